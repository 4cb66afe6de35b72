"""Refits that send only the elements that changed since the last refit (`refit.changed_only`).

With bfloat16 weights and a small learning rate an update leaves the bits of most elements as they were. The
sender of a message keeps in host memory what it sent last, and compares. A message then has one of two forms:
whole, or the positions and the new bits of the changed elements, if this form is smaller. For example, a
changed bfloat16 element takes 4 + 2 bytes, so the second form is smaller if less than a third has changed. A
header of 8 bytes announces the form to each receiver. The receiver writes the new bits over its engine's
elements; both forms leave the same bits there. The first refit of a process, and the first after a change of
the plan, is whole.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rl.refit.plan import Message, MessageBatch
from rl.refit.transfer import Exchange

POSITION = torch.int32
"""Dtype of the positions, counted in elements from the beginning of a message."""
WHOLE = -1
"""Header of a message that is sent whole; else the number of elements that changed."""
UNITS = {2: torch.int16, 4: torch.int32}
"""Bytes of an element of the model's dtype -> integer dtype for comparing the elements' bits."""


class ChangedOnly:
    """The messages of one plan's refits on this rank.

    itemsize: bytes of an element of the model's dtype. A float32 element of a 16-bit model counts as two.
    """

    def __init__(self, itemsize: int):
        self._unit = UNITS[itemsize]
        self._last: dict[int, list[Tensor]] = {}
        """Contents sent last, in host memory, by the number of the batch."""

    def exchange(
        self,
        number: int,
        batch: MessageBatch,
        outgoing: Sequence[Tensor],
        incoming: Sequence[Tensor],
        held: Callable[[], None],
        exchange: Exchange,
    ) -> tuple[int, int]:
        """Exchange the messages of a batch (`rl.refit.transfer.MessageForm.exchange`)."""
        payloads = [self._payload(number, place, packed) for place, packed in enumerate(outgoing)]
        self._last[number] = [packed.to("cpu", copy=True) for packed in outgoing]
        device = next((buffer.device for buffer in (*outgoing, *incoming)), torch.device("cpu"))
        headers = [torch.tensor([count], device=device) for count, _ in payloads]
        announced = [torch.empty(1, dtype=torch.int64, device=device) for _ in incoming]
        exchange(_by_peer(batch.sends, headers), _by_peer(batch.receives, announced))
        counts = [int(count) for count in announced]
        if any(count != WHOLE for count in counts):
            held()
        arriving = [
            buffer if count == WHOLE else buffer.new_empty(self._size(count))
            for buffer, count in zip(incoming, counts)
        ]
        exchange(
            _by_peer(batch.sends, [payload for _, payload in payloads]), _by_peer(batch.receives, arriving)
        )
        for buffer, payload, count in zip(incoming, arriving, counts):
            if count != WHOLE:
                split = count * POSITION.itemsize
                positions = payload[:split].view(POSITION).long()
                buffer.view(self._unit)[positions] = payload[split:].view(self._unit)
        sent = sum((8 + p.nbytes) * len(m.peers) for m, (_, p) in zip(batch.sends, payloads))
        return sent, sum(8 + payload.nbytes for payload in arriving)

    def _payload(self, number: int, place: int, packed: Tensor) -> tuple[int, Tensor]:
        """Return the header and the content of a message."""
        bits = packed.view(self._unit)
        if number not in self._last or len(bits) > torch.iinfo(POSITION).max:
            return WHOLE, packed
        differs = bits != self._last[number][place].to(packed.device).view(self._unit)
        count = int(differs.sum())
        if self._size(count) >= packed.nbytes:
            return WHOLE, packed
        positions = differs.nonzero().flatten()
        return count, torch.cat((positions.to(POSITION).view(torch.uint8), bits[positions].view(torch.uint8)))

    def _size(self, count: int) -> int:
        return count * (POSITION.itemsize + self._unit.itemsize)


def _by_peer(messages: Sequence[Message], contents: Sequence[Tensor]) -> dict[int, list[Tensor]]:
    """Return the non-empty contents by rank, in the order of the messages."""
    out: dict[int, list[Tensor]] = {}
    for message, content in zip(messages, contents):
        for peer in message.peers if len(content) else ():
            out.setdefault(peer, []).append(content)
    return out
