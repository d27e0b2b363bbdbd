"""Attention of sequences that are laid end to end without padding, each over itself or over a window around each token.

On a GPU it is torch's kernel for sequences of different lengths; on a CPU, where long sequences meet a window, blocks
of tokens that see their neighbours. Neither makes a mask of a whole sequence by a whole sequence.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Int32
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.varlen import varlen_attn

from capt.pretrain.base.traits import traits
from capt.pretrain.models import layers
from capt.pretrain.models.layers import Runs, attend

# Rotary positions (Su et al. 2021), in the form that turns feature i with feature i + e/2.


class Rotation(NamedTuple):
    """Cosine and sine of position times frequency, of each row."""

    cos: Float[Tensor, "n 1 1 half"]
    sin: Float[Tensor, "n 1 1 half"]


def rotation(positions: Int[Tensor, " n"], size: int, theta: float) -> Rotation:
    """The angles ``position * theta ** (-2 i / size)`` of heads with ``size`` features, in fp32."""
    powers = torch.arange(0, size, 2, device=positions.device, dtype=torch.float32) / size
    angles = (positions[:, None].float() * (1.0 / theta**powers))[:, None, None]
    return Rotation(angles.cos(), angles.sin())


def rotate(qkv: Float[Tensor, "n 3 heads e"], by: Rotation) -> Float[Tensor, "n 3 heads e"]:
    """``qkv`` with its queries and keys turned, computed in fp32 at least; values stay."""
    if qkv.device.type == "cpu" and not torch.compiler.is_compiling():
        return _Rotate.apply(qkv, *by)  # type: ignore[no-any-return]
    a, b = qkv[:, :2].to(torch.promote_types(qkv.dtype, torch.float32)).chunk(2, -1)
    turned = torch.cat([a * by.cos - b * by.sin, b * by.cos + a * by.sin], -1)
    return torch.cat([turned.to(qkv.dtype), qkv[:, 2:]], 1)


class _Rotate(torch.autograd.Function):
    # The plain formula takes twice the time of this one on a CPU: it makes every half several times.

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(qkv, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grads[0], cos, -sin), None, None


def _turned(qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = torch.promote_types(qkv.dtype, torch.float32)
    cos, sin, (a, b) = cos.to(wide), sin.to(wide), qkv[:, :2].to(wide).chunk(2, -1)
    out = torch.empty_like(qkv)
    if wide == qkv.dtype:
        # Straight into the halves of the output: no copy of queries and keys is made.
        first, second = out[:, :2].chunk(2, -1)
        torch.mul(a, cos, out=first).addcmul_(b, sin, value=-1)
        torch.mul(b, cos, out=second).addcmul_(a, sin)
    else:
        out[:, :2] = torch.cat([(a * cos).addcmul_(b, sin, value=-1), (b * cos).addcmul_(a, sin)], -1)
    out[:, 2] = qkv[:, 2]
    return out


# Sequences of different lengths, and which token sees which.


class Sequences:
    """A batch as rows laid end to end: run ``i`` is rows ``offsets[i]`` to ``offsets[i + 1] - 1``, and sees itself.

    Args:
        shape: b and L of the batch.
        offsets: where runs begin, and the number of rows.
        lengths: those of the runs, where the host knows them: always on a CPU.
        rows: flat positions in the batch of the rows, ascending; None = all.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        offsets: Int32[Tensor, " k"],
        lengths: list[int] | None,
        rows: Int[Tensor, " n"] | None,
    ) -> None:
        self.shape, self.offsets, self.lengths, self.rows = shape, offsets, lengths, rows
        self.longest = shape[1] if lengths is None else max(lengths)
        self._masks: dict[int, Tensor] = {}

    @cached_property
    def run(self) -> Int32[Tensor, " n"]:
        """The run of each row."""
        n = self.shape[0] * self.shape[1] if self.rows is None else len(self.rows)
        numbers = torch.arange(n, device=self.offsets.device, dtype=torch.int32)
        return torch.searchsorted(self.offsets, numbers, right=True, out_int32=True) - 1

    @cached_property
    def positions(self) -> Int[Tensor, " n"]:
        """The place of each row in its run."""
        numbers = torch.arange(len(self.run), device=self.offsets.device)
        return numbers - self.offsets.index_select(0, self.run)

    def take(self, tokens: Int[Tensor, "b L"]) -> Int[Tensor, " n"]:
        """The tokens of the rows."""
        flat = tokens.flatten()
        return flat if self.rows is None else flat.index_select(0, self.rows)

    def find(self, rows: Int[Tensor, "b r"]) -> Int[Tensor, " m"]:
        """The numbers here of the positions ``rows``; of padding, which nobody reads, any."""
        b, length = self.shape
        flat = (rows + torch.arange(0, b * length, length, device=rows.device)[:, None]).flatten()
        if self.rows is None:
            return flat
        return torch.searchsorted(self.rows, flat).clamp_max_(len(self.rows) - 1)

    def spread(self, x: Float[Tensor, "n h"]) -> Float[Tensor, "b L h"]:
        """The rows at their places in the batch, zeros for padding."""
        b, length = self.shape
        if self.rows is not None:
            x = x.new_zeros(b * length, x.shape[-1]).index_copy(0, self.rows, x)
        return x.view(b, length, -1)

    def attend(self, qkv: Float[Tensor, "n 3 heads e"], window: int | None, p: float) -> Float[Tensor, "n h"]:
        """Softmax attention of each row over the rows of its run, at most ``window`` away (None = over all of them).

        Args:
            qkv: queries, keys and values, positions included.
            window: rows on each side.
            p: dropout of the attention weights.
        """
        # A window that reaches over the longest run hides nothing.
        if window is not None and window >= self.longest - 1:
            window = None
        if (simulated := traits().attend_runs) is not None:
            return simulated(qkv, self.longest, window)
        if prefers_kernel(qkv, p):
            return by_kernel(qkv, self.offsets, self.longest, window)
        # Blocks compute less than a mask of the whole run only where the run is long enough.
        if window is not None and (self.lengths is None or self.longest > _NEIGHBOURS * window):
            return self._by_block(qkv, window, p)
        if self.lengths is None:
            runs = Runs(self.offsets, self.longest, layers.has_flash(qkv.device))
            q, k, v = qkv[None].unbind(2)
            return layers.attend_within(q, k, v, runs, p)[0].flatten(1)
        return self._by_length(qkv, window, p)

    def _by_block(self, qkv: Tensor, window: int, p: float) -> Tensor:
        """Rows in blocks of ``window``: a block sees itself and its neighbours, and nothing else is within reach."""
        n, _, heads, e = qkv.shape
        count = -(-n // window)
        # One empty block in front and one behind, so that the first and the last have neighbours too.
        blocks = F.pad(qkv, (0, 0, 0, 0, 0, 0, window, (count + 1) * window - n)).view(-1, window, 3, heads, e)
        near = blocks[:, :, 1:]
        k, v = torch.cat([near[:-2], near[1:-1], near[2:]], 1).permute(2, 0, 3, 1, 4)
        # All local layers of a pass have the same mask.
        if window not in self._masks:
            self._masks[window] = self._block_mask(n, window, count)
        y = attend(blocks[1:-1, :, 0].transpose(1, 2), k, v, self._masks[window], p)
        return y.transpose(1, 2).reshape(-1, heads * e)[:n]

    def _block_mask(self, n: int, window: int, count: int) -> Bool[Tensor, "count 1 window near"]:
        device = self.offsets.device
        # -1: rows of padding belong to no run.
        blocks = F.pad(self.run, (window, (count + 1) * window - n), value=-1).view(-1, window)
        near = torch.cat([blocks[:-2], blocks[1:-1], blocks[2:]], 1)
        distance = torch.arange(-window, 2 * window, device=device) - torch.arange(window, device=device)[:, None]
        return ((blocks[1:-1, :, None] == near[:, None]) & (distance.abs() <= window)).unsqueeze(1)

    def _by_length(self, qkv: Tensor, window: int | None, p: float) -> Tensor:
        """Runs of like lengths are a batch; where they are all equal, nothing is moved."""
        n, _, heads, e = qkv.shape
        rows, places, batches = self._batches
        x = qkv.reshape(n, -1)
        if rows is not None:
            x = _Spread.apply(x, rows, places)
        parts = []
        for part, (runs, size, real) in zip(x.split([batch.rows for batch in batches]), batches, strict=True):
            q, k, v = part.view(runs, size, 3, heads, e).permute(2, 0, 3, 1, 4)
            mask = None if real is None else real[:, None, None, :]
            # A row sees `window` rows on each side; of so few it sees all.
            if window is not None and size > window + 1:
                near = _band(size, window)
                mask = near if mask is None else near & mask
            parts.append(attend(q, k, v, mask, p).transpose(1, 2).reshape(-1, heads * e))
        y = parts[0] if len(parts) == 1 else torch.cat(parts)
        return y if places is None else y.index_select(0, places)

    @cached_property
    def _batches(self) -> tuple[Tensor | None, Tensor | None, list[_Batch]]:
        """For each place of the padded batches its row, for each row its place (None: the same), and the batches."""
        lengths = self.lengths
        assert lengths is not None, "the lengths of the runs are known on a CPU"
        # All of one length: the rows are a batch as they lie.
        if len(set(lengths)) == 1:
            return None, None, [_Batch(len(lengths), lengths[0], None)]
        starts, known = self.offsets[:-1].long(), torch.tensor(lengths)
        sizes = torch.tensor([_rounded(length) for length in lengths])
        batches, rows, places, first = [], [], torch.empty(sum(lengths), dtype=torch.int64), 0
        for size in sizes.unique().tolist():
            chosen = sizes == size
            within = torch.arange(int(known[chosen].max()))
            real = within < known[chosen, None]
            # Places behind a run repeat its first row; the mask hides them, and nobody reads them.
            here = starts[chosen, None] + torch.where(real, within, 0)
            places[here[real]] = first + real.flatten().nonzero()[:, 0]
            rows.append(here.flatten())
            batches.append(_Batch(len(real), len(within), None if bool(real.all()) else real))
            first += real.numel()
        return torch.cat(rows), places, batches


class _Batch(NamedTuple):
    """Runs of like lengths, padded to ``size``; ``real`` is None where none is shorter."""

    runs: int
    size: int
    real: Bool[Tensor, "runs size"] | None

    @property
    def rows(self) -> int:
        """Rows with their padding."""
        return self.runs * self.size


_NEIGHBOURS = 3
"""Windows up to which a run is shorter than the blocks that a block of it sees."""


def _rounded(length: int) -> int:
    """``length`` up to one of eight sizes to each power of 2, of which 16 is the least step."""
    step = max(16, 1 << max(0, length.bit_length() - 4))
    return -(-length // step) * step


def _band(size: int, window: int) -> Bool[Tensor, "1 1 size size"]:
    numbers = torch.arange(size)
    return ((numbers - numbers[:, None]).abs() <= window)[None, None]


class _Spread(torch.autograd.Function):
    """Rows at the places of padded batches; what is put where there is no row is read by nobody."""

    # index_select alone would add the gradients of all rows up one by one.

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return x.index_select(0, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return grads[0].index_select(0, places), None, None


def prefers_kernel(qkv: Tensor, p: float) -> bool:
    """True where `by_kernel` can run: on a GPU from Ampere on, in 16 bits, without dropout of the weights."""
    return qkv.is_cuda and qkv.dtype in (torch.float16, torch.bfloat16) and p == 0 and layers.has_flash(qkv.device)


def by_kernel(
    qkv: Float[Tensor, "n 3 heads e"], offsets: Int32[Tensor, " k"], longest: int, window: int | None
) -> Float[Tensor, "n h"]:
    """Flash attention of runs of different lengths (Dao 2023), with its window; the host waits for nothing."""
    e = qkv.shape[-1]
    q, k, v = F.pad(qkv, (0, -e % 8)).unbind(1)  # the kernel reads eight features at a time
    sides = (-1, -1) if window is None else (window, window)
    y = varlen_attn(q, k, v, offsets, offsets, longest, longest, scale=e**-0.5, window_size=sides)
    assert isinstance(y, Tensor), "nothing else is asked for"
    return y[..., :e].flatten(1)


class MaskedSequences(Sequences):
    """All rows of a batch under masks, for a graph that serves any sizes: an export knows no lengths."""

    def __init__(self, tokens: Int[Tensor, "b L"], real: Bool[Tensor, "b L"] | None) -> None:
        self.shape, self.rows = (tokens.shape[0], tokens.shape[1]), None
        self._real = real
        self.positions = torch.arange(tokens.shape[1], device=tokens.device).repeat(tokens.shape[0])

    def attend(self, qkv: Float[Tensor, "n 3 heads e"], window: int | None, p: float) -> Float[Tensor, "n h"]:
        """See `Sequences.attend`; padding sees itself, so that no row of a mask is empty."""
        b, length = self.shape
        heads, e = qkv.shape[2:]
        q, k, v = qkv.view(b, length, 3, heads, e).permute(2, 0, 3, 1, 4)
        numbers = torch.arange(length, device=qkv.device)
        distance = (numbers - numbers[:, None]).abs()
        mask = None if window is None else (distance <= window)[None, None]
        if self._real is not None:
            seen = self._real[:, None, None, :] if mask is None else mask & self._real[:, None, None, :]
            mask = seen | (distance == 0)
        return attend(q, k, v, mask, p).transpose(1, 2).reshape(b * length, heads * e)


def lay_out(
    tokens: Int[Tensor, "b L"], pad_id: int, padded: bool, documents: Int[Tensor, "b L"] | None, runs: int | None
) -> Sequences:
    """The sequences of a batch without its padding (on a GPU, with padding as runs of its own).

    Arguments are those of `capt.pretrain.models.encoder.Encoder.forward`; padding is at the ends of rows.
    """
    b, length = tokens.shape
    if torch.compiler.is_exporting():
        return MaskedSequences(tokens, tokens != pad_id if padded else None)
    # One run a row: nothing need be looked for in the tokens.
    if (documents is None and not padded) or (documents is not None and runs == b):
        offsets = torch.arange(0, (b + 1) * length, length, device=tokens.device, dtype=torch.int32)
        return Sequences((b, length), offsets, [length] * b, None)
    real = tokens != pad_id
    if tokens.is_cuda:
        # Padding is on the right, so that a row has two runs at most.
        offsets = run_offsets(real if documents is None else documents, 2 * b if documents is None else runs)
        return Sequences((b, length), offsets, None, None)
    rows = real.flatten().nonzero()[:, 0] if padded else None
    # All tokens or none: the batch is laid out as it is.
    if rows is not None and len(rows) in (0, b * length):
        rows = None
    row = torch.arange(b * length) if rows is None else rows
    # A run ends where the row ends, or where the document changes.
    marks = [row // length] if documents is None else [row // length, documents.flatten().index_select(0, row)]
    begins = F.pad(torch.stack([mark.diff() != 0 for mark in marks]).any(0), (1, 0), value=True)
    offsets = F.pad(begins.nonzero()[:, 0], (0, 1), value=len(row)).int()
    return Sequences((b, length), offsets, offsets.diff().tolist(), rows)


def run_offsets(numbers: Tensor, count: int | None) -> Int32[Tensor, " k"]:
    """Return where runs of equal numbers begin in the rows of ``numbers``, laid end to end, and the number of all.

    Args:
        numbers: (b, L), equal in neighbours of one run.
        count: the number of runs, or more: those that there are not have no rows. None: not known, and a GPU waits.
    """
    begins = F.pad(numbers[:, 1:] != numbers[:, :-1], (1, 0), value=True).flatten()
    total = begins.numel()
    # Runs that are not there begin at the end, and have no rows.
    starts = begins.nonzero() if count is None else torch.nonzero_static(begins, size=count, fill_value=total)
    return F.pad(starts.flatten(), (0, 1), value=total).int()
