"""Generates greedily with vLLM, and prints prompts and outputs as JSON: `python generate.py DIR '{"load_format": ...}'`.

With `"lora": DIR` among the arguments the prompts are generated with this adapter.
"""

import json
import sys

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest


PROMPTS = ["The if statement is used for", "Functions", "A list comprehension consists of", "The following"]


def main(folder: str, arguments: dict) -> None:
    adapter = arguments.pop("lora", None)
    more = {"enable_lora": True, "max_lora_rank": 8} if adapter else {}
    model = LLM(folder, **{"dtype": "bfloat16", "max_model_len": 256, "enforce_eager": True, **more, **arguments})
    request = LoRARequest("adapter", 1, adapter) if adapter else None
    sampling = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    results = model.generate(PROMPTS, sampling, use_tqdm=False, lora_request=request)
    outputs = [list(one.outputs[0].token_ids) for one in results]
    print("RESULT " + json.dumps({"prompts": [r.prompt_token_ids for r in results], "outputs": outputs}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
