"""What requests keep between rounds: committed K/V in pages, carried K/V by request slot."""

import torch

from .. import _env
from ..ops import clear_carry
from .config import DrafterConfig


class DrafterState:
    """Pages, block tables, lengths and carry buffers of up to ``max_requests`` requests. Made by ``CarryoverDrafter.new_state``.

    A request is a slot id (0 .. max_requests - 1) from ``allocate`` until ``free``; batches name slots in any order, -1 is padding.

    Attributes (S = max_requests; row S of the per-request tensors is scratch, what padding writes and nothing reads):
        k_cache, v_cache: one view a layer, [pages, page, Hkv, D] in the cache dtype.
        carry_k, carry_v: one a geometry group, [L of group, S, C, Hkv, D] in the carry dtype; empty lists without carry.
        carry_lens: [S] i32, rows carried.
        block_table: [S + 1, P] i32, pages of each request, -1 past its own.
        seq_lens: [S + 1] i32, committed keys; also the position of the next block's anchor, since positions start at 0 here.
    """

    def __init__(self, config: DrafterConfig, max_requests, page_size, num_pages, carry, cache_dtype, carry_dtype, device):
        for name, value in (("max_requests", max_requests), ("page_size", page_size), ("num_pages", num_pages)):
            if value < 1:
                raise ValueError(f"new_state: {name} is {value}, must be at least 1")
        self.config, self.page_size, self.num_pages, self.max_requests = config, page_size, num_pages, max_requests
        self.carry, self.capacity = carry, config.num_draft_tokens
        geometries = [layer.geometry for layer in config.layers]

        def pages(geometry):
            return torch.zeros(num_pages, page_size, geometry.num_kv_heads, geometry.head_dim, dtype=cache_dtype, device=device)

        self._place = {layer: (group, index) for group, layers in enumerate(config.groups) for index, layer in enumerate(layers)}
        self.k_cache, self.v_cache = [pages(g) for g in geometries], [pages(g) for g in geometries]
        self.carry_k, self.carry_v = [], []
        for group in config.groups if carry else ():
            geometry = config.layers[group[0]].geometry
            shape = (len(group), max_requests, self.capacity, geometry.num_kv_heads, geometry.head_dim)
            self.carry_k.append(torch.zeros(shape, dtype=carry_dtype, device=device))
            self.carry_v.append(torch.zeros(shape, dtype=carry_dtype, device=device))
        self.carry_lens = torch.zeros(max_requests, dtype=torch.int32, device=device)
        self.block_table = torch.full((max_requests + 1, num_pages), -1, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(max_requests + 1, dtype=torch.int32, device=device)
        self._free_slots = list(range(max_requests - 1, -1, -1))
        self._free_pages = list(range(num_pages - 1, -1, -1))
        self._pages: dict[int, list[int]] = {}

    @property
    def device(self) -> torch.device:
        return self.seq_lens.device

    @property
    def num_free_pages(self) -> int:
        return len(self._free_pages)

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def allocate(self, num_tokens: int) -> int:
        """Reserve a slot with pages for ``num_tokens`` committed tokens (prompt and answer; carried rows need none), and return it.

        Raises:
            RuntimeError: no slot or too few pages are free; nothing was taken.
            ValueError: num_tokens is beyond what the drafter's RoPE table covers.
        """
        if not self._free_slots:
            raise RuntimeError(f"allocate: all {self.max_requests} request slots are taken, must free one first")
        slot = self._free_slots[-1]
        self._pages[slot] = []
        try:
            self.reserve(slot, num_tokens)
        except (RuntimeError, ValueError):
            del self._pages[slot]
            raise
        self._free_slots.pop()
        self._reset(slot)
        return slot

    def reserve(self, slot: int, num_tokens: int) -> None:
        """Grow ``slot`` to hold ``num_tokens`` committed tokens in all; smaller than it has is no change. Raises as ``allocate`` does."""
        owned = self._owned(slot)
        if num_tokens > self.config.max_positions:
            most = self.config.max_positions
            raise ValueError(f"allocate: num_tokens is {num_tokens}, must be at most {most}: there the drafter's positions end")
        wanted = -(-num_tokens // self.page_size)
        missing = wanted - len(owned)
        if missing > len(self._free_pages):
            raise RuntimeError(f"allocate: {num_tokens} tokens need {missing} more pages, must be at most the {len(self._free_pages)} free")
        if missing > 0:
            owned.extend(self._free_pages.pop() for _ in range(missing))
            self.block_table[slot, : len(owned)] = torch.tensor(owned, dtype=torch.int32, device="cpu")

    def free(self, slot: int) -> None:
        """Give back the slot and its pages, and forget what it carried."""
        self._free_pages.extend(reversed(self._owned(slot)))
        del self._pages[slot]
        self._free_slots.append(slot)
        self._reset(slot)
        self.block_table[slot] = -1

    def clear(self, slots) -> None:
        """Forget what ``slots`` ([R] i32 or a list) carried, not their committed keys: for a step that did not speculate."""
        clear_carry(self.slot_ids(slots), self.carry_lens)

    def slot_ids(self, slots) -> torch.Tensor:
        """``slots`` (list or tensor) as the [R] i32 tensor that the ops take.

        Raises:
            ValueError: a slot is beyond ``max_requests`` (seen on a CPU, elsewhere under CARRYOVER_CHECK=1).
        """
        ids = torch.as_tensor(slots, dtype=torch.int32, device=self.device).contiguous()
        if ids.dim() != 1:
            raise ValueError(f"slots has shape {list(ids.shape)}, must be [R]")
        if (self.device.type == "cpu" or _env.check_values()) and (ids >= self.max_requests).any():
            raise ValueError(f"slots has {int(ids.max())}, must be below {self.max_requests}")
        return ids

    def rows_of(self, slots: torch.Tensor) -> torch.Tensor:
        """[R] i64 rows of ``seq_lens`` and ``block_table`` for slot ids: padding reads and writes the scratch row."""
        return torch.where(slots < 0, self.max_requests, slots).long()

    def carry_of(self, layer: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """carry_k and carry_v of ``layer``, [S, C, Hkv, D] each; None without carry."""
        if not self.carry:
            return None, None
        group, index = self._place[layer]
        return self.carry_k[group][index], self.carry_v[group][index]

    def slot_mapping(self, slots, query_start_loc, num_rejected, positions) -> torch.Tensor:
        """[T] i64: flat cache slot of each verify row from its request's pages, -1 where there is none.

        Raises:
            ValueError: a committed row has none (seen on a CPU, elsewhere under CARRYOVER_CHECK=1: it needs a sync).
        """
        requests, total = slots.shape[0], positions.shape[0]
        if query_start_loc.shape[0] != requests + 1:
            entries = query_start_loc.shape[0]
            raise ValueError(f"absorb: query_start_loc has {entries} entries, must have {requests + 1}: slots names {requests}")
        if requests == 0 or total == 0:
            return torch.full_like(positions, -1)
        if self.device.type == "cpu":
            return self._slot_mapping_on_cpu(slots, query_start_loc, num_rejected, positions)
        rows = torch.arange(total, device=self.device)
        owner = torch.bucketize(rows, query_start_loc[1:].long(), right=True)  # the request whose rows these are, R = nobody's
        owned = (owner < requests) & (rows >= query_start_loc[0])
        owner = owner.clamp(max=requests - 1)
        slot = self.rows_of(slots)[owner]
        page = positions // self.page_size
        in_table = (positions >= 0) & (page < self.block_table.shape[1])
        page_id = self.block_table[slot, page.clamp(0, self.block_table.shape[1] - 1)].long()
        live = owned & (slots[owner] >= 0)
        held = live & in_table & (page_id >= 0)
        if _env.check_values():
            committed = rows < (query_start_loc[1:] - num_rejected)[owner]
            lost = live & committed & ~held
            if lost.any():
                row = int(lost.nonzero()[0])
                self._refuse_position(row, int(positions[row]), int(slot[row]))
        return torch.where(held, page_id * self.page_size + positions % self.page_size, -1)

    def _slot_mapping_on_cpu(self, slots, query_start_loc, num_rejected, positions) -> torch.Tensor:
        """The same from the host's own page lists: a dozen small tensor operations cost more than the rows of a round do."""
        page_size, mapping = self.page_size, [-1] * positions.shape[0]
        position_of, starts = positions.tolist(), query_start_loc.tolist()
        for request, (slot, rejected) in enumerate(zip(slots.tolist(), num_rejected.tolist())):
            if slot < 0:
                continue
            pages, committed = self._pages.get(slot, ()), starts[request + 1] - rejected
            for row in range(max(starts[request], 0), min(starts[request + 1], len(mapping))):
                position = position_of[row]
                if 0 <= position < len(pages) * page_size:
                    mapping[row] = pages[position // page_size] * page_size + position % page_size
                elif row < committed:
                    self._refuse_position(row, position, slot)
        return torch.tensor(mapping, dtype=torch.int64, device="cpu")

    def _refuse_position(self, row: int, position: int, slot: int):
        raise ValueError(
            f"absorb: positions[{row}] is {position}, must be below the tokens that slot {slot} has reserved, {self.num_reserved(slot)}"
        )

    def advance(self, slots, query_start_loc, block_start) -> None:
        """Set the committed lengths of ``slots`` to ``block_start``; requests without rows keep theirs."""
        index = self.rows_of(slots)
        moved = query_start_loc[1:] > query_start_loc[:-1]
        self.seq_lens[index] = torch.where(moved, block_start.int(), self.seq_lens[index])

    def num_reserved(self, slot: int) -> int:
        """Committed tokens that ``slot`` has room for."""
        return len(self._owned(slot)) * self.page_size

    def _owned(self, slot: int) -> list[int]:
        if slot not in self._pages:
            raise ValueError(f"slot is {slot}, must be one that allocate gave and free did not take back")
        return self._pages[slot]

    def _reset(self, slot: int) -> None:
        self.seq_lens[slot] = 0
        clear_carry(self.slot_ids([slot]), self.carry_lens)
