"""Bounded replay: a prompt's early rows stop at the last KV source, and nothing but the prompt decides where."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from support.golden_case import mode_kernels
from support.step_runner import Chunk, StepRunner
from torch import Tensor

from deepinfer.errors import ConfigError
from deepinfer.models.deepseek_v41.config_file import read_config
from deepinfer.models.deepseek_v41.model import DeepseekV41
from deepinfer.models.deepseek_v41.replay import prompt_keep_tokens
from deepinfer.models.deepseek_v41.tensor_table import DraftShare
from deepinfer.models.deepseek_v41.token_map import read_token_map
from deepinfer.models.deepseek_v41.weights import load_weights
from deepinfer.models.model_spec import Prompts

W16 = Path(__file__).parents[1] / "golden" / "w16"
WINDOW, KEEP, RING = 16, 28, 28


@functools.cache
def load(keep_tokens: int | None) -> DeepseekV41:
    """The golden checkpoint, with draft rings, in reference numerics."""
    config = read_config(W16)
    weights = load_weights(
        W16,
        config,
        expert_ids=(tuple(range(config.n_routed_experts)),) * config.num_layers,
        device=torch.device("cpu"),
        draft=DraftShare(None),
    )
    token_map = torch.from_numpy(read_token_map(W16, config)).long()
    return DeepseekV41(config, weights, token_map, mode_kernels("ref"), keep_tokens=keep_tokens)


def make_tokens(seed: int, length: int) -> Tensor:
    return torch.randint(3, 512, (length,), generator=torch.Generator().manual_seed(seed))


class PromptRunner:
    """Runs chunks of prompts whose number of tokens is known from the first chunk on."""

    def __init__(self, keep_tokens: int | None = KEEP) -> None:
        self.runner = StepRunner(load(keep_tokens), max_tokens=128)
        self.caches = self.runner.caches
        self.widths: list[list[int]] = []

    def run(
        self, *chunks: Chunk, prompts: Sequence[int], depth: Sequence[bool] = (), num_padding: int = 0
    ) -> list[Tensor]:
        """Run one step; return the logits [1, V] of each chunk's last row, [0, V] where it lies before the suffix.

        `prompts`: number of prompt tokens by chunk.
        """
        depth = depth or [False] * len(chunks)
        ends = [chunk.start + len(chunk.tokens) for chunk in chunks]
        wanted = [whole or end > n - KEEP for end, n, whole in zip(ends, prompts, depth, strict=True)]
        inputs = self.runner.inputs(chunks, num_padding=num_padding)
        inputs = dataclasses.replace(
            inputs,
            logit_rows=(inputs.sequence_starts[1 : len(chunks) + 1] - 1)[torch.tensor(wanted)],
            prompts=Prompts(
                num_tokens=tuple(prompts),
                first_positions=tuple(chunk.start for chunk in chunks),
                num_rows=tuple(len(chunk.tokens) for chunk in chunks),
                wants_logits=tuple(depth),
            ),
        )
        with torch.inference_mode():
            logits = self.runner.model.forward(inputs).logits
        return list(logits.split([int(row) for row in wanted]))

    def prefill(self, slot: int, tokens: Tensor, sizes: Sequence[int], *, num_prompt_tokens: int) -> Tensor:
        """Run a prompt alone in chunks; return the logits [1, vocabulary] of its last row."""
        done = 0
        for size in sizes:
            chunk = Chunk(slot, done, tokens[done : done + size])
            (logits,) = self.run(chunk, prompts=[num_prompt_tokens])
            done += size
        assert done == len(tokens), (done, len(tokens))
        return logits

    def decode(self, slot: int, tokens: Tensor, *, start: int) -> Tensor:
        """Run one token after the other as a decode rank does; return all logits."""
        return self.runner.run_in_chunks(slot, tokens, [1] * len(tokens), start=start)

    def kv(self, slot: int, num_tokens: int) -> dict[str, Tensor]:
        """What a hand-over holds, by group."""
        blocks = self.runner.block_ids(slot, num_tokens)
        parts = self.runner.model.export_kv(self.caches, slot=slot, block_ids=blocks, num_tokens=num_tokens)
        return {part.group: part.data for part in parts}


def same_kv(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[group], right[group]) for group in left)


def window_records(caches_of: PromptRunner, slot: int, layer: int, positions: range) -> Tensor:
    return caches_of.caches.window[layer][slot * RING + torch.tensor(list(positions)) % RING]


@pytest.mark.parametrize("length", [1, 2, WINDOW, KEEP - 1, KEEP])
def test_a_prompt_no_longer_than_the_kept_suffix_is_exact(length: int) -> None:
    tokens, more = make_tokens(1, length), make_tokens(2, 6)
    exact, cut = PromptRunner(None), PromptRunner()
    wanted = exact.prefill(1, tokens, [length], num_prompt_tokens=length)
    assert torch.equal(cut.prefill(1, tokens, [length], num_prompt_tokens=length), wanted)
    assert same_kv(cut.kv(1, length), exact.kv(1, length))
    assert torch.equal(cut.decode(1, more, start=length), exact.decode(1, more, start=length))


def test_what_is_exact_and_what_is_cut() -> None:
    length = 75
    tokens = make_tokens(3, length)
    exact, cut = PromptRunner(None), PromptRunner()
    full = exact.prefill(1, tokens, [length], num_prompt_tokens=length)
    assert not torch.equal(cut.prefill(1, tokens, [length], num_prompt_tokens=length), full)
    assert torch.equal(cut.kv(1, length)["global"], exact.kv(1, length)["global"])
    assert torch.equal(cut.kv(1, length)["open_pair"], exact.kv(1, length)["open_pair"])
    source = cut.runner.model.config.first_decoder_layer
    positions = range(length - RING, length)
    for layer in range(cut.runner.model.config.num_layers):
        equal = window_records(cut, 1, layer, positions) == window_records(exact, 1, layer, positions)
        # one layer behind the source its own input is exact on the whole suffix, since the source's windows are
        assert equal.all() == (layer <= source + 1), f"layer {layer}"


@pytest.mark.parametrize(
    ("length", "cuts"),
    [(29, [[28, 1], [1, 28]]), (45, [[16] + [1] * 29, [17, 28]]), (90, [[89, 1], [11] * 8 + [2], [70, 20]])],
)
def test_chunks_do_not_change_bits(length: int, cuts: list[list[int]]) -> None:
    # the suffix in one chunk, cut by chunks, and token by token; chunks that end where it begins
    tokens, more = make_tokens(length, length), make_tokens(4, 3)
    runner = PromptRunner()
    wanted = runner.prefill(1, tokens, [length], num_prompt_tokens=length)
    wanted_kv = runner.kv(1, length)
    wanted_more = runner.decode(1, more, start=length)
    for sizes in cuts:
        logits = runner.prefill(2, tokens, sizes, num_prompt_tokens=length)
        assert torch.equal(logits, wanted)
        assert same_kv(runner.kv(2, length), wanted_kv)  # ring and suffix are equally long: every record was written
        assert torch.equal(runner.decode(2, more, start=length), wanted_more)


def test_replays_of_several_requests_in_one_step() -> None:
    lengths = {1: 75, 2: 33, 3: 9}
    tokens = {slot: make_tokens(10 + slot, length) for slot, length in lengths.items()}
    alone = PromptRunner()
    wanted = {slot: alone.prefill(slot, tokens[slot], [n], num_prompt_tokens=n) for slot, n in lengths.items()}
    mixed = PromptRunner()
    pieces = (
        ((2, 0, 20), (1, 0, 40)),
        ((1, 40, 41), (3, 0, 9), (2, 20, 32)),
        ((2, 32, 33), (1, 41, 75)),
    )
    seen = {}
    for number, step in enumerate(pieces):
        chunks = [Chunk(slot, start, tokens[slot][start:end]) for slot, start, end in step]
        logits = mixed.run(*chunks, prompts=[lengths[slot] for slot, _, _ in step], num_padding=number)
        seen |= {slot: row for (slot, _, end), row in zip(step, logits, strict=True) if end == lengths[slot]}
    assert seen.keys() == wanted.keys()
    for slot, row in seen.items():
        assert torch.equal(row, wanted[slot])
        assert same_kv(mixed.kv(slot, lengths[slot]), alone.kv(slot, lengths[slot]))


def test_a_sequence_run_again_with_its_output_goes_on_with_the_same_bits() -> None:
    """The prompt alone decides where the replay starts; rows of the output all run at full depth."""
    length, more = 61, make_tokens(6, 24)
    tokens = make_tokens(5, length)
    first = PromptRunner()
    first.prefill(1, tokens, [length], num_prompt_tokens=length)
    logits = first.decode(1, more, start=length)
    again = torch.cat((tokens, more[:20]))
    runner = PromptRunner()
    last = runner.prefill(1, again, [50, 31], num_prompt_tokens=length)
    assert torch.equal(last, logits[19:20])
    assert torch.equal(runner.decode(1, more[20:], start=length + 20), logits[20:])
    wrong = runner.prefill(2, again, [81], num_prompt_tokens=len(again))
    assert not torch.equal(wrong, last), "output counted as prompt must show, or this test shows nothing"


def test_wanted_prompt_logits_give_the_whole_depth_to_that_sequence_only() -> None:
    length = 60
    tokens, other = make_tokens(7, length), make_tokens(8, length)
    exact = PromptRunner(None).prefill(1, tokens, [length], num_prompt_tokens=length)
    cut = PromptRunner().prefill(1, other, [length], num_prompt_tokens=length)
    runner = PromptRunner()
    full, short = runner.run(Chunk(1, 0, tokens), Chunk(2, 0, other), prompts=[length, length], depth=[True, False])
    assert torch.equal(full, exact)
    assert torch.equal(short, cut)


def test_undone_drafts_still_find_whole_windows() -> None:
    """After a prompt, twelve wrong tokens may run and be undone: what they overwrote is not read again."""
    length, more = 64, make_tokens(9, 4)
    tokens, wrong = make_tokens(11, length), make_tokens(12, 12)
    runner = PromptRunner()
    runner.prefill(1, tokens, [length], num_prompt_tokens=length)
    plain = runner.decode(1, more, start=length)
    runner.prefill(2, tokens, [length], num_prompt_tokens=length)
    runner.runner.run(Chunk(2, length, wrong))
    assert torch.equal(runner.decode(2, more, start=length), plain)


def test_the_shortest_suffix_leaves_no_hole_for_a_former_sequence_to_show_through() -> None:
    """Window + 2: the ring of 28 then holds older records in front of the suffix, and they are handed over too."""
    tokens, more = make_tokens(13, 50), make_tokens(14, 4)
    fresh, used = PromptRunner(WINDOW + 2), PromptRunner(WINDOW + 2)
    used.runner.run(Chunk(1, 0, make_tokens(15, 70)))
    logits = [runner.prefill(1, tokens, [50], num_prompt_tokens=50) for runner in (fresh, used)]
    assert torch.equal(*logits)
    assert not torch.equal(fresh.kv(1, 50)["window"], used.kv(1, 50)["window"])
    assert torch.equal(fresh.decode(1, more, start=50), used.decode(1, more, start=50))


def test_kept_suffix_follows_window_and_drafts() -> None:
    config = read_config(W16)
    assert prompt_keep_tokens(config, None, max_draft_tokens=5) == KEEP
    assert prompt_keep_tokens(config, 18, max_draft_tokens=0) == 18
    with pytest.raises(ConfigError, match=r"27 tokens .* window of 16 .* 1 \+ 5 tokens need 28") as refused:
        prompt_keep_tokens(config, 27, max_draft_tokens=5)
    assert refused.value.path == "model.prefill_keep_tokens"
