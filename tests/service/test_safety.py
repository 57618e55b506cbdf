"""The safety filter: a separate process that checks all outputs, and blocks them if it does not answer."""

from __future__ import annotations

import base64
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from diffserve.api.errors import ConfigError, EngineUnavailable, ModerationBlocked
from diffserve.api.types import Picture
from diffserve.cli import main
from diffserve.media.images import encode_image
from diffserve.media.safety import SafetyQuestion
from diffserve.service.safety import STOPPED_S, Safety
from tests.conftest import SERVER_CONFIG
from tests.service.server import RunningServer, error_of, running_server
from tests.tiny_models import save_safety_checker

pytestmark = pytest.mark.slow

PLUG = """
import os, time

class EverySecond:
    count = 0

    def blocks_prompt(self, prompt):
        if "hang" in prompt:
            time.sleep(60)
        if "fall" in prompt:
            os._exit(1)
        return "forbidden" in prompt

    def blocks_picture(self, pixels):
        assert pixels.dtype == "uint8" and pixels.shape[2] == 3
        EverySecond.count += 1
        return EverySecond.count % 2 == 0

class Odd:
    def blocks_picture(self, pixels):
        return "maybe"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "plug.py").write_text(PLUG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    return tmp_path


def safety(name: str, model: str = "", timeout_s: float = 20.0) -> Safety:
    checker = Safety(name, model, timeout_s=timeout_s, startup_s=100.0)
    checker.start()
    return checker


def test_a_crashed_or_hanging_filter_blocks_everything_and_is_restarted(folder: Path) -> None:
    checker = safety("plug:EverySecond", timeout_s=8.0)
    checker.check_texts({"prompt": "a fox"})
    with pytest.raises(ModerationBlocked):
        checker.check_texts({"prompt": "a forbidden fox"})
    for prompt in ("fall", "hang"):
        with pytest.raises(EngineUnavailable) as refused:
            checker.check_texts({"prompt": prompt})
        assert refused.value.code == "safety_filter_unavailable"
        checker.check_texts({"prompt": "a fox"})
    checker.stop()
    odd = safety("plug:Odd")
    with pytest.raises(EngineUnavailable):
        odd._is_blocked(_question())
    odd.stop()


@pytest.mark.parametrize("side_px", [8, 2048], ids=["small", "larger than the socket's buffer"])
def test_a_suspended_filter_is_replaced_after_five_seconds(folder: Path, side_px: int) -> None:
    judge = safety("plug:EverySecond", timeout_s=30.0)
    assert judge._process is not None
    os.kill(judge._process.pid, signal.SIGSTOP)
    started_s = time.monotonic()
    with pytest.raises(EngineUnavailable) as refused:
        judge._is_blocked(_question(side_px))
    assert STOPPED_S - 0.1 <= time.monotonic() - started_s < 10.0
    assert refused.value.code == "safety_filter_unavailable"
    assert judge._is_blocked(_question(side_px)) is False, "by a new process"
    judge.stop()


def test_a_briefly_suspended_filter_still_answers(folder: Path) -> None:
    judge = safety("plug:EverySecond", timeout_s=30.0)
    assert judge._process is not None
    process = judge._process
    os.kill(process.pid, signal.SIGSTOP)
    going_on = threading.Timer(2.0, os.kill, (process.pid, signal.SIGCONT))
    going_on.start()
    judge.check_texts({"prompt": "a fox"})
    going_on.join()
    assert judge._process is process
    judge.stop()


def _question(side_px: int = 8) -> SafetyQuestion:
    return SafetyQuestion(Picture.from_array(np.zeros((side_px, side_px, 3), np.uint8)))


@pytest.mark.parametrize("name", ["plug:Missing", "nowhere:Filter", "model", "os:getcwd"])
def test_an_unusable_filter_prevents_the_server_start(folder: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"safety_filter '{name}' cannot be used"):
        safety(name, str(folder))


def test_the_models_safety_checker_is_used_if_configured(folder: Path) -> None:
    for threshold in (-2.0, 2.0):
        checker = safety("model", str(save_safety_checker(folder / str(threshold), threshold)))
        assert not checker.judges_prompts
        assert checker._is_blocked(_question()) is (threshold < 0)
        checker.stop()


@pytest.fixture
def filtered(tiny_model: Callable[[str], Path], tmp_path: Path) -> Iterator[RunningServer]:
    (tmp_path / "plug.py").write_text(PLUG)
    config = f'{SERVER_CONFIG}[serve]\nsafety_filter = "plug:EverySecond"\n'
    env = {"PYTHONPATH": str(tmp_path)}
    with running_server(tiny_model("sd15"), tmp_path / "work", config=config, env=env) as server:
        server.wait_until_ready()
        yield server


def test_every_api_withholds_blocked_images(filtered: RunningServer) -> None:
    [entry] = filtered.paint(n=2).json()["data"]
    assert entry["b64_json"]
    assert filtered.paint().status_code == 200
    blocked = filtered.paint()
    assert blocked.status_code == 400
    assert error_of(blocked) == {
        "message": "the safety filter blocked the image; change the prompt.",
        "type": "image_generation_user_error", "param": None, "code": "moderation_blocked",
    }  # fmt: skip
    assert error_of(filtered.paint("a forbidden fox"))["param"] == "prompt"
    two = filtered.paint(n=2, stream=True, partial_images=3, num_steps=4)
    assert "previews are withheld" in two.headers["x-diffserve-warnings"]
    kinds = [line[7:].rpartition(".")[2] for line in two.text.split("\n") if line.startswith("event: ")]
    assert sorted(set(kinds)) == ["completed", "image_failed", "progress"]
    assert '"code":"moderation_blocked"' in two.text
    assert two.text.count("b64_json") == 1
    filtered.paint()
    first_answer = filtered.paint(stream=True)
    assert '"type":"image_generation_user_error"' in first_answer.text
    assert "b64_json" not in first_answer.text
    for count in (2, 1, 1):  # the second to last passes
        tool = {"type": "image_generation", "num_inference_steps": 2, "n": count}
        answer = filtered.client.post("/v1/responses", json={"input": "a fox", "tools": [tool], "stream": True})
        last = json.loads([line for line in answer.text.splitlines() if line.startswith("data: {")][-1][6:])
        errors = [item["error"] for item in last.get("response", {}).get("output", ()) if item["status"] == "failed"]
        details = {"categories": [], "moderation_stage": "output"}
        assert [error["moderation_details"] for error in errors] == [details] * (count == 2)
        assert "error" in last or last["response"]["status"] == "completed"
    assert '"moderation_stage":"output"' in answer.text, "also where nothing is left"
    reply = filtered.client.post("/sdapi/v1/txt2img", json={"prompt": "a fox", "steps": 2, "batch_size": 2}).json()
    assert sorted(json.loads(reply["info"])["nsfw_content_detected"]) == [False, True]
    brightest = [np.asarray(Image.open(BytesIO(base64.b64decode(file)))).max() for file in reply["images"]]
    assert sorted(bright > 0 for bright in brightest) == [False, True]
    refused = filtered.client.post("/sdapi/v1/txt2img", json={"prompt": "forbidden"})
    assert (refused.status_code, refused.json()["code"]) == (400, "moderation_blocked")
    sent = {"image": base64.b64encode(encode_image(Picture.from_array(np.zeros((8, 8, 3), np.uint8)))).decode()}
    codes = [filtered.client.post("/v1/images/upscale", json=sent).status_code for _ in range(2)]
    assert sorted(codes) == [200, 400], "every second upscaled image is blocked"
    failed_answer = filtered.paint("fall")
    assert (failed_answer.status_code, error_of(failed_answer)["code"]) == (503, "safety_filter_unavailable")
    assert int(failed_answer.headers["retry-after"]) > 0
    metrics_text = filtered.client.get("/metrics").text
    for stage, decision in (("prompt", "blocked"), ("prompt", "unavailable"), ("picture", "allowed")):
        assert f'diffserve_safety_total{{decision="{decision}",stage="{stage}"}} 0.0' not in metrics_text
        assert f'diffserve_safety_total{{decision="{decision}",stage="{stage}"}}' in metrics_text
    model = filtered.client.get("/v1/models").json()["data"][0]["capabilities"]["image"]
    assert (model["safety_filter"], model["provenance"]) == ("plug:EverySecond", ["xmp", "wm"])


def test_the_command_line_withholds_blocked_images(
    folder: Path, tiny_model: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "filtered.toml").write_text('[serve]\nsafety_filter = "plug:EverySecond"\n')
    common = ["--model", str(tiny_model("sd15")), "--config", str(folder / "filtered.toml")]

    def ran(*words: str) -> object:
        with pytest.raises(SystemExit) as caught:
            main([*words, *common])
        return caught.value.code

    how = ("--steps", "2", "--seed", "1", "-o")
    assert ran("generate", "a fox", "-n", "2", *how, "a.png") == 1
    assert len(list(folder.glob("a*.png"))) == 1, "every second one is blocked"
    assert "is withheld: the safety filter blocked the image" in " ".join(capsys.readouterr().err.split())
    for prompt, message in (("forbidden", "does not allow the prompt"), ("fall", "does not respond")):
        assert ran("generate", prompt, *how, "b.png") != 0
        assert message in capsys.readouterr().err
    assert not (folder / "b.png").exists()
    prompts = [{"prompt": prompt, "num_inference_steps": 2} for prompt in ("a", "forbidden", "fall", "b", "c")]
    (folder / "lines.jsonl").write_text("\n".join(json.dumps(prompt_line) for prompt_line in prompts))
    assert ran("batch", "lines.jsonl", "-o", "many", "--concurrency", "1") == 1
    results = [json.loads(line) for line in (folder / "many" / "results.jsonl").read_text().splitlines()]
    codes = [result["error"]["code"] if result.get("error") else None for result in results]
    assert codes == [None, "moderation_blocked", "safety_filter_unavailable", None, "moderation_blocked"]
    assert len(list((folder / "many").glob("*.png"))) == 2
