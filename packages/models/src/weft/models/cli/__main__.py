"""`python -m weft.models.cli` is `weft`."""

from . import main

main()
