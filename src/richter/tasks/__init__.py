"""Data: what the papers' experiments and the demo are run on.

    data = richter.tasks.mnist(n=5000, n_test=1000)     # after `richter data fetch mnist`
    data.x, data.y, data.x_test, data.y_test

A file that offers ``TASKS = (mnist, ...)`` is found here; a function of your own is made known by ``richter.tasks.add(spirals)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from richter.core.catalogue import Catalogue, lazy_names, parts

if TYPE_CHECKING:  # what type checkers see of the names that are found
    from richter.tasks.images import *  # noqa: F403
    from richter.tasks.steps import *  # noqa: F403
    from richter.tasks.synthetic import *  # noqa: F403
    from richter.tasks.tabular import *  # noqa: F403
    from richter.tasks.text import *  # noqa: F403

CATALOGUE: Catalogue[Callable[..., Any]] = Catalogue(__name__, "TASKS", "task")
names, get, add = CATALOGUE.names, CATALOGUE.get, CATALOGUE.add

_lazy, __dir__, __all__ = lazy_names(__name__, {
    **CATALOGUE.files(), "Images": "images", "Split": "images", "split": "images", "table_names": "tabular"}, parts(__name__))


def __getattr__(name: str) -> Any:
    return get(name) if name in CATALOGUE else _lazy(name)  # also what was added
