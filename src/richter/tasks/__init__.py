"""Data: what the papers' experiments and the demo are run on.

    data = richter.tasks.mnist(n=5000, n_test=1000)     # after `richter data fetch mnist`
    data.x, data.y, data.x_test, data.y_test
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from richter.core.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, {
    "Images": "images", "Split": "images", "split": "images", "digits": "images", "mnist": "images", "mnist_5k": "images",
    "fashion_mnist": "images", "cifar10": "images",
    "shakespeare": "text", "corpus": "text", "analogies": "text", "tables": "tabular", "table_names": "tabular",
    "chain_monomial": "synthetic", "alignment_reversing": "synthetic", "gaussian": "synthetic",
    "power_law_gaussian": "synthetic", "quadratic": "synthetic", "sparse_parity": "synthetic",
    "modular_arithmetic": "synthetic",
}, ("augment", "files", "registry", "store"))  # so that the registry and the store need no torch

if TYPE_CHECKING:  # what type checkers see of the lazy names
    from richter.tasks import augment, files, registry, store  # noqa: F401
    from richter.tasks.images import Images, Split, cifar10, digits, fashion_mnist, mnist, mnist_5k, split  # noqa: F401
    from richter.tasks.synthetic import (  # noqa: F401
        alignment_reversing,
        chain_monomial,
        gaussian,
        modular_arithmetic,
        power_law_gaussian,
        quadratic,
        sparse_parity,
    )
    from richter.tasks.tabular import table_names, tables  # noqa: F401
    from richter.tasks.text import analogies, corpus, shakespeare  # noqa: F401

