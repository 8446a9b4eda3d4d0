"""Data sets and tasks of the papers' experiments and of the demo.

    data = richter.tasks.mnist(n=5000, n_test=1000)     # after `richter data fetch mnist`
    data.x, data.y, data.x_test, data.y_test

Files that define ``TASKS = (mnist, ...)`` are found automatically; ``richter.tasks.add(spirals)`` registers your own function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from richter.core.catalogue import Catalogue, lazy_names, parts

if TYPE_CHECKING:  # for type checkers, which do not see names that are found at run time
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
    return get(name) if name in CATALOGUE else _lazy(name)  # also tasks that were added
