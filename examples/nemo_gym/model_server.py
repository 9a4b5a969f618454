"""A stand-in for vLLM: answers the shipped example rows of NeMo Gym, right or wrong, without a GPU.

    python model_server.py --port 8765 DATA.jsonl [DATA.jsonl …]

What it says depends on the prompt and the temperature alone, so a run can be repeated and its rewards compared; where
a request gives no temperature, the siblings of a prompt are told apart by the order in which they ask. Like vLLM it
serves /v1/chat/completions with token ids, /tokenize and /v1/models; /v1/responses answers as a judge of pairs.
"""

from __future__ import annotations

import argparse
import json
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

Json = dict[str, Any]
Answer = tuple[int, Json]

# One answer in this many is wrong.
WRONG_EVERY = 3
WRONG = "Z"


def text_of(content: Any) -> str:
    """The text of a message, whether it is a string or a list of parts."""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in cast("list[Json]", content or []))


def last_user_text(messages: Iterable[Mapping[str, Any]]) -> str:
    """What the user said last."""
    return next((text_of(m.get("content")) for m in reversed(list(messages)) if m.get("role") == "user"), "")


class AnswerKey:
    """The example rows by their prompt."""

    def __init__(self, files: Iterable[Path] = ()) -> None:
        self._rows: dict[str, Json] = {}
        self._asked: Counter[str] = Counter()
        self._guard = threading.Lock()
        for file in files:
            for line in file.read_text().splitlines():
                row: Json = json.loads(line)
                asked: Any = row["responses_create_params"]["input"]
                self._rows[asked if isinstance(asked, str) else last_user_text(asked)] = row

    def reply(self, request: Json) -> Json:
        """The assistant's message: the next tool call of a workplace row, or a letter in a box."""
        messages: list[Json] = request["messages"]
        prompt = last_user_text(messages)
        row = self._rows.get(prompt, {})
        steps: list[Json] = row.get("ground_truth") or []
        taken = sum(message["role"] == "assistant" for message in messages)
        # Who was right with the first step goes on.
        right = taken > 0 or self._is_right(prompt, request.get("temperature"))
        if right and taken < len(steps):
            call = {"name": steps[taken]["name"], "arguments": steps[taken]["arguments"]}
            return _message(None, [{"id": f"call-{taken}", "type": "function", "function": call}])
        letter = row.get("expected_answer", "done") if right else WRONG
        return _message(f"\\boxed{{{letter}}}", [])

    def _is_right(self, prompt: str, temperature: Any) -> bool:
        if temperature is None:
            with self._guard:
                self._asked[prompt] += 1
                temperature = self._asked[prompt]
        return zlib.crc32(f"{prompt}|{temperature}".encode()) % WRONG_EVERY != 0


def _message(text: str | None, calls: list[Json]) -> Json:
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}


def tokens(messages: Iterable[Json]) -> list[int]:
    """A tokenizer for people without one: the bytes of what was said."""
    said: list[Any] = [[m["role"], text_of(m.get("content")), m.get("tool_calls") or []] for m in messages]
    return list(json.dumps(said).encode())


def completion(key: AnswerKey, request: Json) -> Json:
    """The answer of /v1/chat/completions, with one log probability per token if it is asked for."""
    message = key.reply(request)
    made = tokens([message])
    asked = len(tokens(request["messages"]))
    choice: Json = {
        "index": 0,
        "message": message,
        "finish_reason": "tool_calls" if "tool_calls" in message else "stop",
    }
    if request.get("logprobs"):
        choice["logprobs"] = {
            "content": [{"token": f"token_id:{t}", "logprob": -0.25, "bytes": None, "top_logprobs": []} for t in made]
        }
    usage = {"prompt_tokens": asked, "completion_tokens": len(made), "total_tokens": asked + len(made)}
    return {
        "id": "canned",
        "object": "chat.completion",
        "created": 0,
        "model": request["model"],
        "choices": [choice],
        "usage": usage,
    }


def judgement(request: Json) -> Json:
    """The answer of /v1/responses: a judge of pairs, which knows the model's wrong answer when it sees it."""
    pair: Json = request.get("metadata") or {}
    first, second = (1 if WRONG in str(pair.get(f"response_{place}")) else 5 for place in (1, 2))
    ranking = 3 if first == second else 1 if first > second else 6
    verdict = json.dumps({"score_1": first, "score_2": second, "ranking": ranking})
    part: Json = {"type": "output_text", "text": verdict, "annotations": []}
    item: Json = {"type": "message", "id": "judged", "role": "assistant", "status": "completed", "content": [part]}
    return {
        "id": "canned", "object": "response", "created_at": 0, "model": request.get("model"), "output": [item],
        "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
    }  # fmt: skip


class ModelServer(ThreadingHTTPServer):
    """Serves on loopback; port 0 takes a free one. `intercept` may answer a request in place of the model."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, key: AnswerKey, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.key = key
        self.intercept: Callable[[str, Json], Answer | None] = lambda path, request: None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def start(self) -> ModelServer:
        """Serve from a thread until `shutdown`."""
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def answer(self, path: str, request: Json) -> Answer:
        """Status and body for one POST."""
        intercepted = self.intercept(path, request)
        if intercepted is not None:
            return intercepted
        if path == "/v1/chat/completions":
            return 200, completion(self.key, request)
        if path == "/v1/responses":
            return 200, judgement(request)
        if path == "/tokenize":
            found = tokens(request["messages"])
            return 200, {"tokens": found, "count": len(found), "max_model_len": 32768}
        return 404, {"error": {"message": f"no such path: {path}"}}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Header and body are two writes; without this the second waits for the first one's acknowledgement.
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._send(*cast(ModelServer, self.server).answer(self.path, json.loads(body)))

    def do_GET(self) -> None:
        self._send(200, {"object": "list", "data": [{"id": "canned", "object": "model"}]})

    def _send(self, status: int, body: Json) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Silent: an example's output is its rewards."""


def main() -> None:
    parser = argparse.ArgumentParser(description="A canned model for the example rows of NeMo Gym.")
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("data", type=Path, nargs="+")
    given = parser.parse_args()
    with ModelServer(AnswerKey(given.data), given.port) as server:
        print(f"serving {server.url}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
