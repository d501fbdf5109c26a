"""Everything we say to a server is in its own description of its routes, and what the stub answers is what SGLang's own types allow.

`sglang-0.5.23-openapi.json` is that description (its origin is in it). It types requests only; answers are checked by SGLang's generated
types where an environment with it exists (`make sglang`), and by the real server in `make test-sglang`.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.tinker.engines.conformance import request, version
from tests.tinker.engines.sglang_fixtures import adapter, serving, until, whole_model
from tests.tinker.engines.sglang_stub import Stub
from tinker.engines.sglang import Transfer

HERE = Path(__file__).parent
SPEC = json.loads((HERE / "sglang-0.5.23-openapi.json").read_text())
PYTHON = Path(os.environ.get("OPENTINKER_SGLANG_PYTHON", HERE.parents[2] / ".venv-sglang/bin/python"))
ROUTES = set(SPEC["paths"])


def problems(schema: Mapping[str, Any], value: Any, where: str) -> Iterator[str]:
    """What is wrong with a value, by the part of JSON Schema that the description uses. Unknown keys are wrong: the server ignores them."""
    if "$ref" in schema:
        schema = SPEC["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        if all(list(problems(each, value, where)) for each in schema["anyOf"]):
            yield f"{where}: {value!r} is none of {schema['anyOf']}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where}: {value!r} is none of {schema['enum']}"
    kinds = {
        "string": str,
        "integer": int,
        "number": (int, float),
        "boolean": bool,
        "array": list,
        "object": dict,
        "null": type(None),
    }
    kind = schema.get("type")
    if kind and (not isinstance(value, kinds[kind]) or (isinstance(value, bool) and kind != "boolean")):
        yield f"{where}: {value!r} is no {kind}"
        return
    if isinstance(value, list):
        for each in value:
            yield from problems(schema.get("items", {}), each, f"{where}[]")
    if isinstance(value, dict) and "properties" in schema:
        for key in schema.get("required", ()):
            if key not in value:
                yield f"{where}: {key} is missing"
        for key, each in value.items():
            if key not in schema["properties"]:
                yield f"{where}: there is no {key}"
            else:
                yield from problems(schema["properties"][key], each, f"{where}.{key}")


async def everything() -> Stub:
    """A server that was asked everything we ever ask."""
    stubs = [Stub(), Stub()]
    for transfer in (Transfer.FILES, Transfer.TENSORS):
        async with serving(*stubs, transfer=transfer) as engine:
            await engine.load(version("ann"), adapter())
            await engine.generate(request(under=version("ann"), temperature=0.7, stop_ids=(9,)))
            await engine.load(version("bob", 1), whole_model(1))
            await engine.unload(version("ann"))
            stubs[0].go.clear()
            task = asyncio.create_task(engine.generate(request()))
            await until(lambda: stubs[0].running)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            stubs[0].go.set()
            await engine.replicas[0].address.score([5, 6, 7])
            await engine.unload(version("bob", 1))
            await until(lambda: not any(stub.adapters for stub in stubs) and stubs[1].model_path == "/models/base")
        for stub in stubs:
            stub.label = "default"
    both = Stub()
    both.requests = [each for stub in stubs for each in stub.requests]
    both.responses = [each for stub in stubs for each in stub.responses]
    return both


async def test_every_request_is_as_the_server_describes_it() -> None:
    asked = (await everything()).requests
    found = []
    for route, body in asked:
        methods = SPEC["paths"][route]
        method = methods["post"] if "post" in methods else methods["get"]
        content = method.get("requestBody", {}).get("content", {}).get("application/json", {})
        found += [f"{route}{each}" for each in problems(content.get("schema", {}), body, "")]
    assert found == []
    assert {route for route, _ in asked} == ROUTES  # else the description, or this test, is too large or too small


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/generate", {"input_ids": [1], "lora_name": "x"}),
        ("/load_lora_adapter", {"lora_name": "x"}),
        ("/pause_generation", {"mode": "retracted"}),
        ("/update_weight_version", {"new_version": 3}),
    ],
)
def test_a_wrong_request_would_be_found(route: str, body: dict[str, Any]) -> None:
    schema = SPEC["paths"][route]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert list(problems(schema, body, "")) != []


CHECK = """
import importlib.util, json, pathlib, sys
place = pathlib.Path(importlib.util.find_spec("sglang").origin).parent / "api/v1/api_types.py"
spec = importlib.util.spec_from_file_location("api_types", place)
types = importlib.util.module_from_spec(spec); sys.modules["api_types"] = types; spec.loader.exec_module(types)
KINDS = {"asked": types.GenerateRequest, "answered": types.GenerateResponse}
for line in sys.stdin:
    kind, value = json.loads(line)
    KINDS[kind].from_json_value(value)
print("checked")
"""


@pytest.mark.skipif(not PYTHON.exists(), reason="no environment with SGLang: `make sglang` makes one")
async def test_sglangs_own_types_take_what_we_say_and_what_the_stub_answers() -> None:
    stub = await everything()
    lines = [json.dumps(["asked", body]) for route, body in stub.requests if route == "/generate"]
    lines += [
        json.dumps(["answered", answer])
        for route, status, answer in stub.responses
        if route == "/generate" and status == 200 and answer["output_ids"]
    ]
    ran = await asyncio.to_thread(
        subprocess.run, [PYTHON, "-c", CHECK], input="\n".join(lines), capture_output=True, text=True
    )
    assert (ran.stdout.strip(), ran.returncode) == ("checked", 0), ran.stderr[-2000:]
