"""Starts a real `llama-server` with what `export --target llama.cpp` writes, command and preset alike: do the experts
of the intended layers go to the CPU, and is the text the same wherever they are?

    python convert_hf_to_gguf.py traces/demo_model --outfile demo.gguf        # llama.cpp's own script
    python tests/benchmarks/llama_cpp_exports.py --server build/bin/llama-server --gguf demo.gguf --draft draft.gguf

The converter knows tokenizers by a hash and refuses the demo model's, which is plain GPT-2 byte pairs: have its
`get_vocab_base_pre` return "gpt-2" for it.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from simulator.exports import ExportOptions, export
from simulator.exports.source import ExportSource
from simulator.exports.whole_layers import split_layers
from simulator.policies.config import parse_config
from trace_capture.known_shapes import find_shape
from trace_capture.samples import sample_folder

PORT = 8131
_OVERRIDDEN = re.compile(r"tensor blk\.(\d+)\.ffn_\w*exps\.weight .*overridden to CPU")
_PROVENANCE = {
    "model": "demo_model",
    "trace_digest": "none",
    "hardware": "none",
    "hardware_digest": "none",
    "predicted_tpot_ms": 1.0,
    "predicted_hit_rate": 0.5,
}
CASES: dict[str, dict[str, Any]] = {
    "all on the device": {"cache": {"policy": "resident", "budget_ratio": 1.0}},
    "half": {"cache": {"budget_ratio": 0.5}},
    "layers of different slots": {"cache": {"slots_per_layer": [32, 8, 32, 8, 8, 32, 4, 32, 32, 4, 8, 32]}},
    "all on the CPU": {"cache": {"budget_ratio": 0.5}, "cpu": {"layers": "all"}, "prefill": {"micro_batch": 4096}},
    "half, drafts": {"cache": {"budget_ratio": 0.5}, "provenance": _PROVENANCE | {"gamma": 4}},
}


def main() -> int:
    """Try all cases; 1 where one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", required=True, help="llama-server")
    parser.add_argument("--gguf", required=True, help="the demo model, converted")
    parser.add_argument("--draft", help="its draft model, converted")
    given = parser.parse_args()
    shape = find_shape(str(sample_folder() / "demo_model" / "config.json"))
    texts, wrong = set(), 0
    for name, raw in CASES.items():
        config = parse_config(raw)
        if config.provenance is not None and given.draft is None:
            continue
        source = ExportSource(config, shape)
        wanted = set(source.decoder_layers(split_layers(source).elsewhere))
        done = export(config, "llama.cpp", shape, options=ExportOptions(given.gguf, given.draft, 512))
        with tempfile.TemporaryDirectory() as folder:
            done.write(Path(folder), is_folder=True)
            found, text = started([given.server, *shlex.split(done.command)[1:], "-v"], "none")
            _, preset_text = started([given.server, "--models-preset", f"{folder}/preset.ini"], "demo_model")
        texts |= {text, preset_text}
        wrong += found != wanted
        print(f"{name}: {'right' if found == wanted else f'WRONG, wanted {sorted(wanted)}'}: CPU has {sorted(found)}")
    print(f"texts, by command and by preset: {sorted(texts)}")
    return 1 if wrong or len(texts) != 1 or "" in texts else 0


def started(command: list[str], model: str) -> tuple[set[int], str]:
    """Layers whose experts the log says are on the CPU, and what the server answers."""
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen([*command, "--port", str(PORT)], stdout=log, stderr=log)
        try:
            text = _answer(server, model)
        finally:
            server.terminate()
            server.wait(timeout=60)
        log.seek(0)
        return {int(layer) for layer in _OVERRIDDEN.findall(log.read())}, text


def _answer(server: subprocess.Popen[bytes], model: str) -> str:
    """The greedy continuation, as soon as the server is up; nothing where it ended."""
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0, "repeat_penalty": 1.0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    deadline = time.monotonic() + 120
    while server.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return str(json.load(reply)["choices"][0]["text"])
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.5)
    return ""


if __name__ == "__main__":
    sys.exit(main())
