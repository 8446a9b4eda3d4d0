"""The run-time type checker of the tests: an int is a float, as in PEP 484."""

from beartype import BeartypeConf, beartype

typechecked = beartype(conf=BeartypeConf(is_pep484_tower=True))
