"""Runs the exchange of keys and values for an attention layer, and the exchange of gradients back."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from weft.kernels.extension import Places, VisibleKeys
from weft.mesh import ProcessMesh
from weft.reshard.extension import (
    LazyText,
    Pending,
    Running,
    announce,
    device_mesh,
    group_along,
    process_mesh,
    run_or_replay,
    this_rank,
)

from ...layers import DotProductAttention
from ..styles import CONTEXT_AXIS
from .exchange import KeyExchange, RowOrders, inverse


class KeysOnTheirWay:
    """An exchange of a layer's keys and values under way. A `ReceivedKeys` of weft.kernels.

    A hook of `KeysAndValues` returns a KeysOnTheirWay instead of the keys, and the layer hands it to attention as the
    argument `key`. There `take_received` (hooks.py) moves it to the argument `received`.
    window: the attention's; None for attention without a window.
    Communication: an all-to-all, started when the object is made and waited for in attention. A second all-to-all, of
    gradients, is started and waited for in attention's backward. None where no rank along "cp" needs a remote key.
    """

    def __init__(self, key: DTensor, value: DTensor, order: RowOrders, window: int | None) -> None:
        self._tensors: tuple[DTensor, DTensor] | None = key, value
        local = key.to_local().detach(), value.to_local().detach()
        self._group, _ = group_along(key.device_mesh, (CONTEXT_AXIS,))
        self._ranks = process_mesh(key.device_mesh).submesh(this_rank(), CONTEXT_AXIS)
        device = torch.device("cpu") if key.is_meta else local[0].device
        self._exchange = _exchange_on(key.device_mesh, order, window, device)
        with torch.no_grad():
            rows = [x.reshape(-1, x.shape[-1]) for x in local]
            outgoing = torch.cat([_selected(each, self._exchange.sent) for each in rows], 1)  # [sent, 2 * width]
            sends = self._exchange.is_needed
            self._pending: Pending | None = (
                run_or_replay(self._run, outgoing) if sends else Pending.finished(outgoing[:0])
            )

    def take(self) -> tuple[DTensor, DTensor]:
        """The rank's own keys and values. Called once, before attention.

        This object then drops the tensors. Autograd's graph keeps this object, and with the tensors would keep the
        memory of a layer that is recomputed.
        """
        tensors, self._tensors = self._tensors, None
        assert tensors is not None, "attention takes the keys once"
        return tensors

    @property
    def own(self) -> VisibleKeys:
        return self._exchange.own

    @property
    def received(self) -> VisibleKeys:
        return self._exchange.received

    @property
    def queries(self) -> slice:
        return self._exchange.queries

    @property
    def places(self) -> Places:
        return self._exchange.places

    def wait(self) -> tuple[Tensor, Tensor]:
        """The received keys and values, [1, R, kv_heads * D] each, in reading order."""
        pending, self._pending = self._pending, None
        assert pending is not None, "attention waits once"
        key, value = pending.wait().unsqueeze(0).chunk(2, -1)
        return key, value

    def return_gradients(self, dkey: Tensor, dvalue: Tensor) -> Callable[[Tensor, Tensor], None]:
        """Start to return the gradients of received keys and values, [1, R, kv_heads * D] each, to the senders.

        Returns a function add(dkey, dvalue) for this rank's own keys and values, which waits for the gradients from all
        ranks and adds in place, in the order of the ranks. dkey, dvalue: [tokens, kv_heads * D].
        """
        exchange = self._exchange
        if not exchange.is_needed:
            return lambda dkey, dvalue: None
        pending = Pending(self._run_back(torch.cat((dkey[0], dvalue[0]), 1)))

        def add(dkey: Tensor, dvalue: Tensor) -> None:
            arrived = pending.wait()
            if arrived.is_meta:
                return
            width = dkey.shape[-1]
            counts = list(exchange.sent_counts)
            parts = zip(torch.split(exchange.sent, counts), torch.split(arrived, counts), strict=True)
            for tokens, part in parts:
                # a receiver returns a token once, so a call adds no element twice, and the order of sums is fixed
                dkey.index_add_(0, tokens, part[:, :width])
                dvalue.index_add_(0, tokens, part[:, width:])

        return add

    def _run(self, outgoing: Tensor) -> Running:
        exchange = self._exchange
        received = yield from self._exchanged(outgoing, exchange.sent_counts, exchange.received_counts)
        return _selected(received, exchange.arrangement)

    def _run_back(self, gradients: Tensor) -> Running:
        exchange = self._exchange
        outgoing = _selected(gradients, inverse(exchange.arrangement))
        return (yield from self._exchanged(outgoing, exchange.received_counts, exchange.sent_counts))

    def _exchanged(self, outgoing: Tensor, sent: tuple[int, ...], received: tuple[int, ...]) -> Running:
        """An all-to-all of the rows of `outgoing`. sent, received: the number of rows for each rank of the group."""
        announce(LazyText(lambda: f"keys by documents over {CONTEXT_AXIS!r}"), ranks=sorted(self._ranks or ()))
        arrived = outgoing.new_empty((sum(received), outgoing.shape[1]))
        work = dist.all_to_all_single(arrived, outgoing, list(received), list(sent), self._group, async_op=True)
        assert work is not None, "async_op=True returns the work"
        yield work
        return arrived


def _exchange_on(mesh: DeviceMesh, order: RowOrders, window: int | None, device: torch.device) -> KeyExchange:
    """This rank's exchange for rows in `order`. mesh: of the keys. window: the attention's. device: of the exchange."""
    at = process_mesh(mesh).coordinate(this_rank())
    assert at is not None, "ranks outside the mesh exchange no keys"
    return order.exchange(group_along(mesh, (CONTEXT_AXIS,))[1], at[CONTEXT_AXIS], window, device)


def prepare_exchanges(
    model: nn.Module, mesh: ProcessMesh, order: RowOrders, device: torch.device, dtype: torch.dtype
) -> None:
    """Plan the exchanges of all attention layers ahead of a step; `order` caches the plans. Called by `prepare_rows`.

    On a CPU also plans the calls of torch's fused attention. dtype: of the queries.
    Communication: none, apart from making the mesh's process groups.
    """
    attends = [each for each in model.modules() if isinstance(each, DotProductAttention)]
    for window in {each.window for each in attends}:
        exchange = _exchange_on(device_mesh(mesh, device.type), order, window, device)
        for visible in (exchange.own, exchange.received) if device.type == "cpu" else ():
            visible.fused_calls(dtype)


def _selected(rows: Tensor, indices: Tensor) -> Tensor:
    """The rows with these indices; on the meta device, a tensor of the result's shape."""
    return rows.new_empty((len(indices), rows.shape[1])) if rows.is_meta else rows.index_select(0, indices)
