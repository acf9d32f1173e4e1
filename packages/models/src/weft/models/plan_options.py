"""The values of a plan's options, as types for plans, for searches of plans and for `weft train`; without torch."""

from __future__ import annotations

from typing import Literal

Context = Literal["all_gather", "ulysses"]  # how tokens on a rank attend to the tokens of other ranks along "cp"
Recompute = Literal["none", "selective", "full"]  # what backward computes again
TokenTransport = Literal["exchange", "gather"]  # how tokens reach their experts along "ep"
Zero = Literal[0, 1, 2, 3]  # ZeRO's level: from 1 on optimizer states are sharded, from 2 gradients, from 3 parameters
