"""Models of timm and torchvision, where these are installed: kernels and correlations are those of brute force, and measuring
changes nothing."""

from __future__ import annotations

import copy
import importlib
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oracles
import richter
from assessing import Product, Products, opened
from richter.core import Mark
from richter.instrument.capture import state_of
from richter.instrument.survey import survey
from zoo_architectures import awake

timm = pytest.importorskip("timm")
try:
    import torchvision  # type: ignore[import-not-found]
except (ImportError, RuntimeError, OSError) as error:  # an import that another version of torch breaks
    pytest.skip(f"torchvision cannot be imported: {error}", allow_module_level=True)

pytestmark = pytest.mark.long
EXAMPLES, CLASSES, MATRICES = 3, 3, 20
TOLERANCE = 1e-8
SMALL = 500_000  # parameters of a model whose linearisation gap is compared too
WIDEST = 1536  # inputs of a matrix whose feature matrices are formed
MEASURES = ("nfc", "tangent_cka", "function_change", "linearisation_gap")


@dataclass(frozen=True)
class Published:
    """A model of a library, made as small as the library allows."""

    name: str
    size: int  # of the images, in pixels
    factory: Callable[[], nn.Module]


def of_timm(name: str, size: int = 32, **settings: Any) -> Published:
    return Published(name, size, lambda: timm.create_model(name, pretrained=False, num_classes=CLASSES, **settings))


def of_torchvision(name: str, size: int = 32, **settings: Any) -> Published:
    return Published(f"torchvision_{name}", size,
                     lambda: torchvision.models.get_model(name, weights=None, num_classes=CLASSES, **settings))


def of_class(name: str, size: int, path: str, **settings: Any) -> Published:
    """A model of a class, where the functions of the library have fixed widths."""
    module, _, kind = path.rpartition(".")
    return Published(name, size, lambda: getattr(importlib.import_module(module), kind)(num_classes=CLASSES, **settings))


def small_vgg() -> nn.Module:
    """A VGG without its wide head."""
    model = torchvision.models.VGG(torchvision.models.vgg.make_layers([16, "M", 24, "M", 32, 32, "M"]), init_weights=False)
    model.classifier = nn.Sequential(nn.Linear(32 * 49, 32), nn.ReLU(), nn.Dropout(), nn.Linear(32, CLASSES))
    return model


SELECSLS = {"block": timm.models.selecsls.SelecSlsBlock, "num_features": 32, "head": [(24, 32, 3, 1)],
            "features": [(32, 0, 16, 16, True, 2), (16, 16, 16, 24, False, 1)],
            "feature_info": [{"num_chs": 24, "reduction": 4, "module": "features.1"}]}
MODELS = [
    # convolutions
    of_timm("resnet10t"),
    of_timm("test_resnet"),
    of_timm("seresnet50", layers=(1, 1, 1, 1), channels=(8, 16, 24, 32)),
    of_timm("resnest14d", channels=(8, 16, 24, 32)),
    of_timm("skresnet18", channels=(16, 16, 32, 32)),
    of_timm("res2net50_26w_4s", layers=(1, 1, 1, 1), base_width=8),
    of_timm("lambda_resnet26t", 64, width_factor=0.25),
    of_timm("botnet26t_256", 64, img_size=64, width_factor=0.25),
    of_timm("test_nfnet"),
    of_timm("nf_resnet26", depths=(1, 1, 1, 1), channels=(16, 24, 32, 48)),
    of_class("resnetv2_bit", 64, "timm.models.resnetv2.ResNetV2", layers=(1, 1, 1, 1), channels=(128, 128, 128, 128),
             stem_chs=32),
    Published("torchvision_vgg", 32, small_vgg),
    of_timm("mobilenetv2_035"),
    of_timm("mobilenetv3_small_050"),
    of_timm("mobilenetv4_conv_small_035"),
    of_timm("lcnet_035"),
    of_timm("test_efficientnet"),
    of_timm("test_efficientnet_gn"),
    of_timm("test_efficientnet_evos"),
    of_timm("tinynet_e"),
    of_timm("regnetx_002"),
    of_timm("regnety_002"),
    of_timm("nf_regnet_b0", channels=(16, 24, 32, 48), depths=(1, 1, 1, 1)),
    of_timm("densenet121", growth_rate=8, block_config=(2, 2, 2, 2)),
    of_timm("densenetblur121d", growth_rate=8, block_config=(2, 2, 2, 2)),
    of_timm("ghostnet_050"),
    of_timm("repghostnet_050"),
    of_timm("hrnet_w18_small", 32),
    of_timm("inception_next_atto"),
    of_timm("test_byobnet"),
    of_timm("fastvit_t8"),
    of_timm("dla46_c"),
    of_timm("dla46x_c"),
    of_timm("cs3darknet_focus_s"),
    of_timm("cspnext_tiny"),
    of_timm("convnext_zepto_rms"),
    of_timm("test_convnext"),
    of_timm("convnextv2_atto", dims=(16, 24, 32, 48), depths=(1, 1, 2, 1)),
    of_class("convmixer", 32, "timm.models.convmixer.ConvMixer", dim=32, depth=3, patch_size=4, kernel_size=5),
    of_timm("edgenext_xx_small"),
    of_timm("efficientvit_b0"),
    of_timm("fasternet_t0"),
    of_timm("starnet_s050"),
    of_timm("test_mambaout"),
    of_timm("rexnet_100", width_mult=0.4),
    of_timm("semnasnet_075"),
    of_timm("mnasnet_small"),
    of_timm("hgnetv2_b0"),
    of_timm("ese_vovnet19b_slim_dw"),
    of_class("selecsls", 32, "timm.models.selecsls.SelecSls", cfg=SELECSLS),
    # attention
    of_timm("levit_128s", 64, img_size=64, embed_dim=(32, 48, 64), key_dim=8, num_heads=(2, 3, 4), depth=(1, 1, 1)),
    of_timm("levit_conv_128s", 64, img_size=64, embed_dim=(32, 48, 64), key_dim=8, num_heads=(2, 3, 4), depth=(1, 1, 1)),
    of_timm("tiny_vit_5m_224", 64, embed_dims=(16, 32, 32, 48), depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 3)),
    of_timm("efficientformer_l1", 224, embed_dims=(8, 12, 16, 32), depths=(1, 1, 1, 2)),
    of_class("efficientformerv2", 64, "timm.models.efficientformer_v2.EfficientFormerV2", img_size=64, num_vit=1,
             embed_dims=(16, 24, 32, 48), depths=(1, 1, 1, 2)),
    of_timm("efficientvit_m0", 64, img_size=64, embed_dim=(16, 32, 48), key_dim=(8, 8, 8), num_heads=(2, 2, 2),
            depth=(1, 1, 1)),
    of_timm("xcit_nano_12_p16_224", 64, img_size=64, depth=2, embed_dim=64),
    of_timm("cait_xxs24_224", 32, img_size=32, embed_dim=48, depth=2),
    of_timm("deit_tiny_distilled_patch16_224", 32, img_size=32, embed_dim=48, depth=2),
    of_timm("deit3_small_patch16_224", 32, img_size=32, embed_dim=48, depth=2),
    of_timm("test_vit", 32, img_size=32),
    of_timm("test_vit3", 32, img_size=32),
    of_timm("vit_relpos_small_patch16_224", 32, img_size=32, embed_dim=48, depth=2),
    of_timm("vit_tiny_r_s16_p8_224", 64, img_size=64, embed_dim=48, depth=2),
    of_timm("beit_base_patch16_224", 32, img_size=32, embed_dim=48, depth=2),
    of_timm("eva02_tiny_patch14_224", 28, img_size=28, embed_dim=48, depth=2),
    of_timm("swin_tiny_patch4_window7_224", 32, img_size=32, embed_dim=24, depths=(2, 2), num_heads=(2, 4), window_size=4),
    of_timm("swinv2_tiny_window8_256", 32, img_size=32, embed_dim=24, depths=(2, 2), num_heads=(2, 4), window_size=4),
    of_timm("swinv2_cr_tiny_ns_224", 64, img_size=64, embed_dim=24, depths=(2, 2), num_heads=(2, 4)),
    of_class("mixer", 32, "timm.models.mlp_mixer.MlpMixer", img_size=32, patch_size=8, embed_dim=48, num_blocks=2),
    of_class("gmixer", 32, "timm.models.mlp_mixer.MlpMixer", img_size=32, patch_size=8, embed_dim=48, num_blocks=2,
             mlp_ratio=(1.0, 4.0), mlp_layer=timm.layers.GluMlp, act_layer=nn.SiLU),
    of_class("resmlp", 32, "timm.models.mlp_mixer.MlpMixer", img_size=32, patch_size=8, embed_dim=48, num_blocks=2, mlp_ratio=4,
             block_layer=timm.models.mlp_mixer.ResBlock, norm_layer=timm.models.mlp_mixer.Affine),
    of_class("gmlp", 32, "timm.models.mlp_mixer.MlpMixer", img_size=32, patch_size=8, embed_dim=48, num_blocks=2, mlp_ratio=6,
             block_layer=timm.models.mlp_mixer.SpatialGatingBlock, mlp_layer=timm.layers.GatedMlp),
    of_timm("test_maxvit", 64, img_size=64),
    of_timm("coat_tiny", 64, img_size=64, embed_dims=(16, 24, 24, 24), serial_depths=(1, 1, 1, 1), parallel_depth=1),
    of_timm("crossvit_tiny_240", 120, img_size=120, embed_dim=(24, 48), depth=((1, 1, 0),) * 2),
    of_timm("mobilevit_xxs", 64),
    of_timm("pit_ti_224", 64, img_size=64, base_dims=(16, 16, 16), depth=(1, 1, 1)),
    of_timm("pit_ti_distilled_224", 64, img_size=64, base_dims=(16, 16, 16), depth=(1, 1, 1)),
    of_class("poolformer", 32, "timm.models.metaformer.MetaFormer", dims=(16, 24, 32, 48), depths=(1, 1, 1, 1),
             downsample_norm=None, mlp_act=nn.GELU, mlp_bias=True, norm_layers=timm.models.metaformer.GroupNorm1,
             layer_scale_init_values=1e-5, res_scale_init_values=None, use_mlp_head=False),
    of_class("poolformerv2", 32, "timm.models.metaformer.MetaFormer", dims=(16, 24, 32, 48), depths=(1, 1, 1, 1),
             norm_layers=timm.models.metaformer.GroupNorm1NoBias, use_mlp_head=False),
    of_timm("pvt_v2_b0", 64, embed_dims=(16, 24, 40, 48), num_heads=(1, 2, 5, 8), depths=(1, 1, 1, 1)),
    of_timm("tnt_s_legacy_patch16_224", 32, img_size=32, embed_dim=48, inner_dim=8, depth=2, num_heads_outer=4,
            num_heads_inner=2),
    of_timm("twins_svt_small", 64, img_size=64, embed_dims=(16, 24, 32, 48), num_heads=(1, 2, 4, 4), depths=(1, 2, 2, 2)),
    of_timm("twins_pcpvt_small", 64, img_size=64, embed_dims=(16, 24, 32, 48), num_heads=(1, 2, 4, 4), depths=(1, 1, 1, 1)),
    of_timm("visformer_tiny", 64, img_size=64, init_channels=8, embed_dim=48, depth=(1, 1, 1), num_heads=3),
    of_class("volo", 64, "timm.models.volo.VOLO", layers=(1, 1, 1, 1), img_size=64, embed_dims=(48, 64, 64, 64),
             num_heads=(2, 4, 4, 4)),
    of_timm("convit_tiny", 32, img_size=32, embed_dim=48, depth=3, local_up_to_layer=2),
    of_class("nest", 64, "timm.models.nest.Nest", img_size=64, embed_dims=(24, 32, 48), num_heads=(1, 2, 4), depths=(1, 1, 1)),
    of_timm("davit_tiny", 64, depths=(1, 1, 1, 1), embed_dims=(16, 24, 32, 48), num_heads=(1, 2, 4, 4), window_size=2),
    of_class("focalnet", 64, "timm.models.focalnet.FocalNet", embed_dim=16, depths=(1, 1, 1, 1)),
    of_timm("sequencer2d_s", 56, img_size=56, layers=(1, 1, 1, 1), embed_dims=(24, 24, 24, 24), hidden_sizes=(6, 6, 6, 6)),
    of_timm("swiftformer_xs", 64, embed_dims=(16, 24, 32, 48), layers=(1, 1, 1, 1)),
    of_timm("hiera_tiny_224", 64, img_size=(64, 64), embed_dim=16, stages=(1, 1, 1, 1)),
    # torchvision
    of_torchvision("squeezenet1_1"),
    of_torchvision("shufflenet_v2_x0_5"),
    of_torchvision("mobilenet_v2", width_mult=0.25),
    of_torchvision("mobilenet_v3_small", width_mult=0.5),
    of_torchvision("mnasnet0_5"),
    of_torchvision("googlenet", init_weights=False, aux_logits=False),
    of_class("torchvision_densenet", 32, "torchvision.models.DenseNet", growth_rate=8, block_config=(2, 2, 2, 2)),
    of_torchvision("efficientnet_b0"),
    of_torchvision("regnet_y_400mf"),
    of_torchvision("regnet_x_400mf"),
    of_class("torchvision_resnet", 32, "torchvision.models.ResNet", block=torchvision.models.resnet.BasicBlock,
             layers=[1, 1, 0, 0]),
    of_class("torchvision_resnext", 32, "torchvision.models.ResNet", block=torchvision.models.resnet.Bottleneck,
             layers=[1, 1, 0, 0], groups=8, width_per_group=2),
    of_class("torchvision_convnext", 32, "torchvision.models.ConvNeXt",
             block_setting=[torchvision.models.convnext.CNBlockConfig(16, 32, 1),
                            torchvision.models.convnext.CNBlockConfig(32, None, 2)]),
    of_class("torchvision_vit", 32, "torchvision.models.VisionTransformer", image_size=32, patch_size=8, num_layers=2,
             num_heads=4, hidden_dim=48, mlp_dim=96),
    of_class("torchvision_swin", 32, "torchvision.models.SwinTransformer", patch_size=[4, 4], embed_dim=16, depths=[2, 2],
             num_heads=[2, 4], window_size=[4, 4]),
    of_class("torchvision_swin_v2", 32, "torchvision.models.SwinTransformer", patch_size=[4, 4], embed_dim=16, depths=[2, 2],
             num_heads=[2, 4], window_size=[4, 4], block=torchvision.models.swin_transformer.SwinTransformerBlockV2,
             downsample_layer=torchvision.models.swin_transformer.PatchMergingV2),
    of_class("torchvision_maxvit", 32, "torchvision.models.MaxVit", input_size=(32, 32), stem_channels=8, partition_size=4,
             block_channels=[16, 24], block_layers=[1, 1], head_dim=8, stochastic_depth_prob=0.0),
]
BY_NAME = {m.name: m for m in MODELS}


# ------------------------------------------------------------------------------------------------------------ brute force


class Chosen(Products):
    """Products of some parameters only. A weight that its module computes is kept under the name of that module's weight."""

    def __init__(self, model: nn.Module, running: list[nn.Module], names: set[str]) -> None:
        super().__init__(model, running)
        self.parameters = {k: (name, p) for k, (name, p) in self.parameters.items() if name in names}
        self.computed |= {m: k for k, m in model.named_modules() if "StdConv" in type(m).__name__}
        self.weights: dict[str, Tensor] = {}  # the whole weights, as they were multiplied

    def _keep(self, z: Tensor, w: Any, arrange: Callable[[Tensor], Tensor]) -> Tensor:
        entries = self._entries(w)
        if entries is not None and self.parameters.get(w.untyped_storage().data_ptr()) is None:
            self.weights[entries[0]] = w.detach()
        return super()._keep(z, w, arrange)


@dataclass
class Truth:
    """Tangent kernels of every module, summed over outputs, and of the chosen weights sum g g^T by product."""

    kernels: dict[str, Tensor]  # [n,n]
    covariances: dict[str, list[tuple[Product, Tensor]]]  # weight -> (product, sum g g^T) of every example
    weights: dict[str, Tensor]


def brute_force(model: nn.Module, x: Tensor, names: set[str]) -> Truth:
    """One example and one output at a time. Each example goes through the model in a batch of two copies, because torch
    differentiates some batches of one wrongly (docs/torch_batch_norm.py)."""
    parameters = {k: p for k, p in model.named_parameters() if p.requires_grad}
    running: list[nn.Module] = []
    handles = [m.register_forward_pre_hook(lambda module, _: running.append(module)) for m in model.modules()]
    handles += [m.register_forward_hook(lambda *_: (running.pop(), None)[1], always_call=True) for m in model.modules()]
    rows: dict[str, list[Tensor]] = {k: [] for k in parameters}
    covariances: dict[str, list[tuple[Product, Tensor]]] = {}
    values = {k: p.detach() for k, p in parameters.items()}
    for i in range(len(x)):
        forget(model)
        running.clear()
        with opened(model), Chosen(model, running, names) as mode:
            f = model(x[[i, i]]).sum(0) / 2
        values |= mode.weights
        variables = [*parameters.values(), *(p.delta for p in mode.products)]
        gradients = [oracles._gradient(f_o, variables) for f_o in f]
        for j, k in enumerate(parameters):
            rows[k].append(torch.stack([g[j] for g in gradients]).flatten(1))
        for j, p in enumerate(mode.products):
            g = torch.cat([g[len(parameters) + j] for g in gradients])
            covariances.setdefault(p.parameter, []).append((p, g.T @ g))
    for handle in handles:
        handle.remove()
    forget(model)
    of_parameters = {}
    for k in parameters:
        J = torch.stack(rows.pop(k))
        of_parameters[k] = torch.einsum("nkp,mkp->nm", J, J)
    kernels = {}
    for name, module in model.named_modules():
        own = [f"{name}.{p}" if name else p for p, _ in module.named_parameters(recurse=False)]
        if own := [p for p in own if p in of_parameters]:
            kernels[name] = torch.stack([of_parameters[p] for p in own]).sum(0)
    return Truth(kernels, covariances, values)


def forget(model: nn.Module) -> None:
    """Empty what a model keeps in eval mode: each example computes it anew."""
    for module in model.modules():
        vars(module).get("attention_bias_cache", {}).clear()


def chosen(model: nn.Module) -> set[str]:
    """Weights of linear layers and convolutions, spread over the model."""
    weights = [f"{k}.weight" for k, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv1d, nn.Conv2d))
               and m.weight[0].numel() * getattr(m, "groups", 1) <= WIDEST and min(m.weight.flatten(1).shape) > 1]
    return set(weights if len(weights) <= MATRICES else
               [weights[i * (len(weights) - 1) // (MATRICES - 1)] for i in range(MATRICES)])


def expected_nfc(truth: Truth, parameter: str, index: Tensor) -> float:
    """Cosine of W^T W and W^T K W of the map with these entries [r, d_out, d_in] of the weight; NaN if K is rounding error."""
    W = torch.block_diag(*truth.weights[parameter].flatten()[index])
    K = sum(covariance[rows][:, rows] for p, covariance in truth.covariances[parameter]
            if (rows := places(p.index, index)) is not None)
    largest = max(float(covariance.norm()) for uses in truth.covariances.values() for _, covariance in uses)
    return oracles.cosine(W.T @ W, W.T @ K @ W) if K.norm() > 1e-30 * largest else math.nan


def places(product: Tensor, index: Tensor) -> Tensor | None:
    """Which outputs of a product are the rows of a map: those with the same first entry."""
    if product.shape[0] != index.shape[0] or product.shape[2] != index.shape[2]:
        return None
    return (product[..., 0].flatten() == index[..., 0].reshape(-1, 1)).int().argmax(1)


# ------------------------------------------------------------------------------------------------------------------- tests


def images(model: Published) -> Tensor:
    return torch.randn(EXAMPLES, 3, model.size, model.size, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def state(model: nn.Module) -> dict[str, Any]:
    """Everything that a measurement may not change, and the random stream."""
    found: dict[str, Any] = {k: v.clone() for k, v in model.state_dict(keep_vars=False).items()}
    found |= {f"{k} gradient": None if p.grad is None else p.grad.clone() for k, p in model.named_parameters()}
    for name, module in model.named_modules():
        found |= {f"{name} {k}": v for k, v in vars(module).items() if isinstance(v, (bool, int, float, str))}
        found |= {f"{name} {k}": len(v) for k, v in vars(module).items() if isinstance(v, dict)}
    return found | {"stream": torch.get_rng_state()}


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    return [k for k in {**a, **b} if not (k in a and k in b and (
        torch.equal(a[k], b[k]) if isinstance(a[k], Tensor) else a[k] == b[k]))]


def moved(model: nn.Module) -> dict[str, Tensor]:
    """The state of the model with each of its weights moved by a tenth."""
    draw = torch.Generator().manual_seed(3)
    return {k: v * (1 + 0.1 * torch.randn(v.shape, generator=draw, dtype=v.dtype)) if k in dict(model.named_parameters())
            else v.clone() for k, v in model.state_dict().items()}


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.fixture(scope="module", params=list(BY_NAME))
def published(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor, Truth]:
    """A model in eval mode, its images and what brute force says of them."""
    case = BY_NAME[request.param]
    model, x = awake(case.factory)(), images(case)
    return model, x, brute_force(model, x, chosen(model))


def test_there_are_at_least_60_models() -> None:
    assert len(BY_NAME) == len(MODELS) >= 60


def test_kernels(published: tuple[nn.Module, Tensor, Truth]) -> None:
    model, x, truth = published
    whole = torch.stack(list(truth.kernels.values())).sum(0)
    assert relative(richter.kernels.ntk(model, x), whole) < TOLERANCE
    kernels = richter.kernels.ntk(model, x, per_layer=True)
    assert set(kernels) == set(truth.kernels)
    noise = 1e-16 * float(whole.norm())  # gradients may be zero up to rounding error
    wrong = [name for name, K in truth.kernels.items() if float((kernels[name] - K).norm()) > TOLERANCE * float(K.norm()) + noise]
    assert not wrong


def test_correlations(published: tuple[nn.Module, Tensor, Truth]) -> None:
    """Every matrix that was chosen has correlations, and they are those of brute force."""
    model, x, truth = published
    names = chosen(model)
    modules = tuple(name.removesuffix("weight") for name in names)
    initial = moved(model)
    model.train()
    before = state(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # notes that are read below
        snap = richter.measure(model, richter.Probe(x, torch.arange(len(x)) % CLASSES), MEASURES, initial=initial,
                               layers=lambda name: f"{name}.".startswith(modules))
    assert not differences(before, state(model))
    model.eval()
    if sum(p.numel() for p in model.parameters()) < SMALL and not hasattr(model, "cls_token1"):  # CoaT's is as small as an eps
        now, then = copy.deepcopy(model), copy.deepcopy(model)
        then.load_state_dict(initial)
        assert snap.value("linearisation_gap") == pytest.approx(oracles.linearisation_gap(now, then, x), rel=1e-7)
    maps = survey(model, x, state_of(model)).maps
    covered, wrong = set(), []
    for row in snap.rows:
        if row.measure != "nfc" or row.layer not in maps:
            continue
        m = maps[row.layer]
        parameter, index = m.weight or f"{m.module}.weight", m.index.reshape(m.shape)
        if parameter in names:
            covered.add(parameter)
            value = expected_nfc(truth, parameter, index.reshape(-1, *index.shape[-2:]))
            undefined = math.isnan(value) and row.mark is Mark.UNDEFINED
            if not undefined and not abs(row.value - value) < TOLERANCE:
                wrong.append(f"{row.layer}: {row.value} instead of {value}")
    assert not wrong
    assert covered == names
