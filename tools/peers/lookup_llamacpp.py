"""llama.cpp's prompt lookup decoding (llama-cpp-python), for `tools/bench_speculation.py --peer`; runs in a peer's
environment.

usage: python lookup_llamacpp.py GGUF DRAFTS [THREADS]
A line of JSON in (prompt_token_ids, max_tokens), one out (seconds, tokens). DRAFTS 0: none.
"""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    import llama_cpp
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    path, drafts = sys.argv[1], int(sys.argv[2])
    threads = int(sys.argv[3]) if len(sys.argv) > 3 else len(os.sched_getaffinity(0))
    llm = llama_cpp.Llama(
        path,
        n_ctx=4096,
        n_threads=threads,
        n_threads_batch=threads,
        n_batch=2048,
        n_ubatch=512,
        draft_model=LlamaPromptLookupDecoding(num_pred_tokens=drafts) if drafts else None,
        verbose=False,
    )
    for line in sys.stdin:
        request = json.loads(line)
        began, tokens = time.perf_counter(), []
        llm.reset()
        stream = llm.generate(request["prompt_token_ids"], top_k=1, temp=0.0, repeat_penalty=1.0, reset=True)
        for token in stream:
            tokens.append(token)
            if token == llm.token_eos() or len(tokens) == request["max_tokens"]:
                break
        stream.close()
        print(json.dumps({"seconds": time.perf_counter() - began, "tokens": len(tokens)}), flush=True)


if __name__ == "__main__":
    main()
