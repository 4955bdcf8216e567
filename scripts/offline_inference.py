"""The shortest use of the Python API: a few prompts, answered by the embedded tiny model on this machine."""

from __future__ import annotations

from deepinfer import LLM, SamplingParams


def main() -> None:
    """Answer two text prompts and one of token ids, then a chat."""
    print("starting an engine: 2 prefill and 4 decode ranks on the CPU, the embedded tiny model (random weights)")
    with LLM(model="tiny") as llm:
        params = SamplingParams(max_tokens=16, temperature=0.7, seq_seed=1)
        outputs = llm.generate(["The capital of France is", "Two plus two is", [1, 5, 7]], params)
        outputs += llm.chat([[{"role": "user", "content": "hi"}]], params, thinking=False)
    for output in outputs:
        print(f"{output.prompt!r} -> {output.outputs[0].text!r} ({output.outputs[0].finish_reason})")


if __name__ == "__main__":
    main()
