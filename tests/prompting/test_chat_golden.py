"""The 18 golden encode cases: text and token ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deepinfer.errors import RequestError
from deepinfer.tokenizer import Tokenizer, encode_chat
from deepinfer.tokenizer.chat import Segment, encode_segments

CASES = json.loads((Path(__file__).parents[1] / "golden" / "prompting.json").read_text())["encode"]
IMAGE = "<｜deepseek_image｜>"


def openai_request(case: dict[str, Any]) -> dict[str, Any]:
    """The case's input with its two vendor spellings (schema on the system message, `wo_eos`) in request form."""
    request = json.loads(json.dumps(case["input"]))
    for message in request["messages"]:
        if "response_format" in message:
            schema = message.pop("response_format")
            request["response_format"] = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        if "wo_eos" in message:
            message["prefix"] = message.pop("wo_eos")
    return request


@pytest.mark.parametrize("case", [c for c in CASES if c["name"] != "12_image"], ids=lambda c: c["name"])
def test_golden_case(tokenizer: Tokenizer, case: dict[str, Any]) -> None:
    encoded = encode_chat(tokenizer, **openai_request(case))
    assert encoded.text == case["expected_text"]
    assert encoded.token_ids == case["expected_token_ids"]
    assert encoded.output_format.in_reasoning == case["expected_text"].endswith("<think>")


def test_golden_image_case(tokenizer: Tokenizer) -> None:
    """Images are refused; layout and ids of the case hold for what surrounds the image."""
    (case,) = [c for c in CASES if c["name"] == "12_image"]
    request = openai_request(case)
    with pytest.raises(RequestError, match="images are not supported") as caught:
        encode_chat(tokenizer, **request)
    assert caught.value.param == "messages[0].content[1]"

    request["messages"][0]["content"][1] = {"type": "text", "text": IMAGE}
    encoded = encode_chat(tokenizer, **request)
    assert encoded.text == case["expected_text"]
    before, _, behind = case["expected_text"].partition(f"Look:\n\n{IMAGE}\n\nWhat is it?")
    line = before.removeprefix("<｜begin▁of▁sentence｜><｜System｜>").removesuffix("<｜User｜>")
    assert behind == "<｜Assistant｜><think>"
    segments = [
        Segment("<｜begin▁of▁sentence｜>", True),
        Segment("<｜System｜>", True),
        Segment(line, False),
        Segment("<｜User｜>", True),
        Segment("Look:\n\n", False),
        Segment(IMAGE, True),
        Segment("\n\nWhat is it?", False),
        Segment("<｜Assistant｜>", True),
        Segment("<think>", True),
    ]
    assert encode_segments(tokenizer, segments) == case["expected_token_ids"]
