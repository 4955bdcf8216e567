"""Whole answers are read as the vendor's own package reads them.

Cut answers are left out, where we close calls that ended by themselves, and newlines behind a final `<`, of which the
package (0.2.0) shows one: the rule says that they are stripped.
"""

from __future__ import annotations

import json
import random
from typing import Any

import deepseek_recipe as recipe
from prompting_answers import block, invoke, parameter, read, tokens_of

from deepinfer.tokenizer import Tokenizer

WORDS = ["a", " b", "é", "毕", "\n", "\n\n", "12", '"q"', "<b>", "</", "END", "👩‍👧", "\\n", "{x}", "EN", "D"]


def vendor_reads(text: str, *, thinking: bool, parse_tools: bool, stop: list[str]) -> dict[str, Any]:
    conversation = recipe.Conversation([recipe.UserMessage("q")], thinking_mode=thinking)
    request = recipe.ConversationRequest(conversation, recipe.ModelVersion.DeepseekV41Flash)
    stage = recipe.ThinkingInitialStage.ReasoningStart if thinking else None
    processor = recipe.StreamProcessor(
        recipe.ChatCompletionRequest.chunk_generator(request, "id", "model"),
        recipe.ParsingOptions(parse_tool_calls=parse_tools, thinking_initial_stage=stage, stop_sequences=stop),
    )
    response = recipe.ChatCompletionResponse("id", "model", 0, 1, 0)
    for chunk in (
        recipe.InferenceChunk.ready(),
        recipe.InferenceChunk.text(text, 1),
        recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop),
    ):
        for part in [] if processor.finished else processor.push(chunk):
            response.accumulate(part)
    (choice,) = json.loads(response.to_json())["choices"]
    message = choice["message"]
    return {
        "reasoning": message.get("reasoning_content") or "",
        "content": message.get("content") or "",
        "calls": [
            (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []
        ],
        "finish": choice["finish_reason"],
    }


def test_random_answers(tokenizer: Tokenizer) -> None:
    generator = random.Random(2)

    def some(count: int) -> str:
        return "".join(generator.choices(WORDS, k=generator.randint(0, count)))

    num_with_calls = 0
    for _ in range(1000):
        thinking, parse_tools = generator.random() < 0.5, generator.random() < 0.7
        text = some(6)
        if thinking:
            text = some(5) + generator.choice(["</think>", "\n</think>", "</think>\n\n"]) + text
        calls = [
            invoke(
                "f", *[parameter(f"k{i}", some(4), string=generator.choice(["true", "false"])) for i in range(count)]
            )
            for count in [generator.randint(0, 2) for _ in range(generator.randint(0, 2))]
        ]
        if calls:
            text += "\n" * generator.randint(0, 3) + block(*calls) + generator.choice(["", "\n", " tail"])
        if "</\n" in text:
            continue
        stop = generator.choice([[], [], ["END"], ["\n\n"], ["b"]])
        result = read(
            tokenizer, tokens_of(tokenizer, text), thinking=thinking, parse_tools=parse_tools, stop=tuple(stop)
        )
        ours = {
            "reasoning": result.reasoning,
            "content": result.content,
            "calls": [(call.name, call.arguments) for call in result.tool_calls],
            "finish": result.finish_reason,
        }
        assert ours == vendor_reads(text, thinking=thinking, parse_tools=parse_tools, stop=stop), text
        num_with_calls += bool(result.tool_calls)
    assert num_with_calls > 100
