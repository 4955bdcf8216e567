"""The free blocks of one paged group."""

from __future__ import annotations


class BlockPool:
    """Hands out block ids `1 .. num_blocks - 1`; block 0 belongs to padding rows and is never handed out.

    The block returned last is handed out first.
    """

    def __init__(self, num_blocks: int) -> None:
        """Start with every block free; `num_blocks` counts the padding block."""
        assert num_blocks >= 1, f"a pool needs the padding block, got {num_blocks} blocks"
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, 0, -1))
        self._is_held = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        """Blocks that can be taken now."""
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """All blocks that can ever be taken: the padding block is not among them."""
        return self.num_blocks - 1

    def take(self, count: int) -> list[int]:
        """Return `count` blocks; the caller has made sure that they are free."""
        assert count <= len(self._free), f"asked for {count} blocks, {len(self._free)} are free"
        taken = [self._free.pop() for _ in range(count)]
        for block_id in taken:
            self._is_held[block_id] = 1
        return taken

    def give_back(self, block_ids: list[int]) -> None:
        """Return held blocks to the pool."""
        for block_id in reversed(block_ids):
            assert self._is_held[block_id], f"block {block_id} is not held"
            self._is_held[block_id] = 0
            self._free.append(block_id)

    def check(self, held: list[int]) -> None:
        """Assert that `held` are exactly the blocks that are not free, each once."""
        assert len(held) == len(set(held)), "a block is held twice"
        assert len(self._free) == len(set(self._free)), "a block is free twice"
        assert set(held) | set(self._free) == set(range(1, self.num_blocks)), "free and held are not all blocks"
        assert len(held) + len(self._free) == self.num_usable, "a block is free and held"
        assert sum(self._is_held) == len(held), f"{sum(self._is_held)} blocks are marked as held, not {len(held)}"
