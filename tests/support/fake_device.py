"""A device without a model: it really keeps a cache, and each token depends on all that the cache says.

A sequence whose blocks are mixed up, freed too early or granted too late therefore draws wrong tokens. Rows of
rejected drafts and wasted rows write garbage, as on a real device.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from deepinfer.codec import unpack
from deepinfer.kv_cache.kv_groups import KVGroup
from deepinfer.protocol import Request, SamplingParams
from deepinfer.scheduler.step_plan import Int32Array, PrefillChunk, SlotAdmission, SlotOutput, StepOutput, StepPlan

GROUPS = (
    KVGroup("main", "paged", 4, 400, True, "main-test"),
    KVGroup("index", "paged", 6, 60, True, "index-test"),
    KVGroup("window", "sequence", 4, 100, False, "window-test"),
)
EOS = 0
VOCABULARY = 40
_GARBAGE = 9_999_999


def draw_token(history: np.ndarray, sampling: SamplingParams, sample: int) -> int:
    """Return the token behind `history`: a hash of every token in it, the seed and the sample number."""
    weights = np.arange(1, len(history) + 1, dtype=np.int64) * 7919
    total = int(((history.astype(np.int64) + 3) * weights % 1_000_003).sum())
    return (total + 31 * (sampling.seq_seed or 0) + 17 * sample) * 2_654_435_761 % 2**32 % VOCABULARY


def expected_output(request: Request, sample: int, max_model_len: int) -> list[int]:
    """Return the whole output of one sample of `request`, drawn without any cache."""
    history = unpack(request.prompt_token_ids)
    output: list[int] = []
    limit = min(request.sampling.max_tokens, max_model_len - len(history))
    while len(output) < limit and output[-1:] != [EOS]:
        output.append(draw_token(history, request.sampling, sample))
        history = np.append(history, output[-1])
    return output


class FakeDevice:
    """Runs plans. `num_commits(sequence length)` says how many tokens a decode row run commits, at least 1."""

    def __init__(
        self,
        *,
        num_blocks: dict[str, int],
        num_slots: int,
        max_model_len: int,
        num_commits: Callable[[int], int] = lambda length: 1,
        fails: Callable[[int], bool] = lambda token_id: False,
    ) -> None:
        self._paged = [group for group in GROUPS if group.kind == "paged"]
        self._max_model_len = max_model_len
        self._num_commits = num_commits
        self._fails = fails
        self._kv = {g.name: np.full((num_blocks[g.name], g.tokens_per_block), -1, np.int64) for g in self._paged}
        self._tables = {g.name: np.zeros((num_slots, max_model_len), np.int64) for g in self._paged}
        self._tokens = np.zeros((num_slots, max_model_len + 1), np.int64)
        self._lengths = np.zeros(num_slots, np.int64)
        self._slots: dict[int, SlotAdmission] = {}
        self.num_rows = 0

    def run(self, plan: StepPlan) -> StepOutput:
        """Run one step."""
        for admission in plan.admissions:
            self._admit(admission)
        for grant in plan.grants:
            assert 0 not in grant.block_ids, "the padding block was granted"
            stop = grant.first_index + len(grant.block_ids)
            self._tables[grant.group][grant.slot, grant.first_index : stop] = grant.block_ids
        outputs = [self._run_chunk(chunk) for chunk in plan.chunks]
        outputs += [self._decode(slot, plan.max_rows_per_slot) for slot in plan.decode_slots.tolist()]
        return StepOutput(plan.step_id, tuple(output for output in outputs if output is not None))

    def gather(self, block_ids: dict[str, Int32Array], num_tokens: int) -> dict[str, np.ndarray]:
        """Return the records of a sequence's first `num_tokens` tokens, by group."""
        return {name: self._kv[name][blocks].reshape(-1)[:num_tokens].copy() for name, blocks in block_ids.items()}

    def scatter(self, block_ids: dict[str, Int32Array], records: dict[str, np.ndarray]) -> None:
        """Write records into blocks."""
        for name, blocks in block_ids.items():
            size = self._kv[name].shape[1]
            for entry, block in enumerate(blocks.tolist()):
                part = records[name][entry * size : (entry + 1) * size]
                self._kv[name][block, : len(part)] = part

    def _admit(self, admission: SlotAdmission) -> None:
        assert admission.slot != 0, "the padding slot was given away"
        self._slots[admission.slot] = admission
        for table in self._tables.values():
            table[admission.slot] = 0
        self._tokens[admission.slot, : len(admission.token_ids)] = admission.token_ids
        self._lengths[admission.slot] = len(admission.token_ids)

    def _run_chunk(self, chunk: PrefillChunk) -> SlotOutput | None:
        stop = chunk.start_position + chunk.num_tokens
        for position in range(chunk.start_position, stop):
            self._write(chunk.slot, position, int(self._tokens[chunk.slot, position]))
        self.num_rows += chunk.num_tokens
        if not chunk.samples:
            return None
        assert stop == self._lengths[chunk.slot], "the sampling chunk is not the last one"
        admission = self._slots[chunk.slot]
        history = self._read(chunk.slot, stop)
        samples = range(admission.first_sample, admission.first_sample + admission.num_samples)
        drawn = [draw_token(history, admission.sampling, sample) for sample in samples]
        return self._output(chunk.slot, drawn)

    def _decode(self, slot: int, num_rows: int) -> SlotOutput:
        admission = self._slots[slot]
        first = int(self._lengths[slot])
        num_rows = min(num_rows, self._max_model_len - first + 1)
        drawn = []
        for position in range(first - 1, first - 1 + min(num_rows, self._num_commits(first))):
            self._write(slot, position, int(self._tokens[slot, position]))
            drawn.append(draw_token(self._read(slot, position + 1), admission.sampling, admission.first_sample))
            self._tokens[slot, position + 1] = drawn[-1]
            self._lengths[slot] += 1
        for position in range(int(self._lengths[slot]) - 1, first - 1 + num_rows):
            self._write(slot, position, _GARBAGE)
        self.num_rows += 1
        return self._output(slot, drawn)

    def _output(self, slot: int, drawn: list[int]) -> SlotOutput:
        if any(self._fails(token_id) for token_id in drawn):
            return SlotOutput(slot, np.zeros(0, np.int32), failure="logits are not finite")
        return SlotOutput(slot, np.array(drawn, np.int32), num_drafted=5, num_accepted=len(drawn) - 1)

    def _write(self, slot: int, position: int, value: int) -> None:
        for name, table in self._tables.items():
            size = self._kv[name].shape[1]
            self._kv[name][table[slot, position // size], position % size] = value

    def _read(self, slot: int, num_tokens: int) -> np.ndarray:
        """Return the history as the first group has it, spoilt by whatever the other groups have instead."""
        first, *others = (
            self._kv[group.name][self._tables[group.name][slot, : group.num_blocks_for(num_tokens)]].reshape(-1)
            for group in self._paged
        )
        history = first[:num_tokens]
        for other in others:
            history = history + 5 * (other[:num_tokens] - first[:num_tokens])
        return history
