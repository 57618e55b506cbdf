"""Webhooks and uploads: a real HTTPS server with a real certificate gets events and results, also after a crash."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from openai import InvalidWebhookSignatureError, OpenAI

from diffserve.api.errors import InvalidRequest
from diffserve.client import Client, WebhookEndpoint
from diffserve.service.http.outgoing import OutgoingClient
from diffserve.service.stored.delivery_runner import DeliveryError, DeliveryRunner, send_event
from diffserve.service.stored.owners import Owners
from diffserve.settings.layers import load_settings
from diffserve.store import Database, Keys
from diffserve.store.deliveries import MAX_AT_ONCE, Deliveries
from diffserve.store.jobs import Jobs
from diffserve.store.webhooks import WebhookEndpoints
from tests.certificates import Chain, make_chain
from tests.readme import DOCS, blocks
from tests.service.server import GENERATIONS, SOON_S, RunningServer, error_of, running_server, wait_for

HOST, PUBLIC, OTHER_PUBLIC = "hooks.example.org", "93.184.216.34", "93.184.216.35"
ENDPOINTS = "/v1/webhook_endpoints"
JOBS = "/v1/jobs"
BODY = {"prompt": "a red fox", "num_inference_steps": 2, "size": "64x64", "seed": 1}
EVENTS = ["job.succeeded", "job.failed", "batch.completed", "response.completed", "response.cancelled"]
CONFIG = f'[serve]\nwebhook_hosts = ["{HOST}"]\nupload_hosts = ["{HOST}"]\n'
LAUNCH = """
import asyncio, ssl, sys
from diffserve.service.http import outgoing
from diffserve.store import deliveries
root, port = sys.argv[1], int(sys.argv[2])
plain = outgoing.OutgoingClient.__init__
def connect(address, _, **options):
    assert address == "{public}", address
    return asyncio.open_connection("127.0.0.1", port, **options)
def prepared(self, hosts, **options):
    context = ssl.create_default_context(cafile=root)
    plain(self, hosts, **options, resolve=lambda *_: ["{public}"], connect=connect, context=context)
outgoing.OutgoingClient.__init__ = prepared
deliveries.DELAYS_S = (0.5,) * 9
deliveries.PAUSE_S = 0.1
deliveries.EVENT_S = deliveries.UPLOAD_S = 5.0
deliveries.LEASE_RESERVE_S = 1.0
from diffserve.cli import main
sys.argv[1:3] = ["serve"]
if __name__ == "__main__":
    sys.exit(main())
""".replace("{public}", PUBLIC)


class Received(NamedTuple):
    """Request that the HTTPS server got."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Receiver:
    """HTTPS server that answers with ``status`` and collects its requests."""

    def __init__(self, chain: Chain) -> None:
        self.requests: list[Received] = []
        self.status = 200
        self.may_answer = threading.Event()
        self.may_answer.set()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                receiver.requests.append(Received(self.command, self.path, headers, body))
                receiver.may_answer.wait(SOON_S)
                self.send_response(receiver.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_POST = do_PUT = answer  # noqa: N815  # the names that the base class looks for

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(chain.chain, chain.key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]

    @contextmanager
    def running(self) -> Iterator[Receiver]:
        thread = threading.Thread(target=self._server.serve_forever)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()

    def events(self, secret: str | None) -> list[tuple[str, str]]:
        """Return type and object of the received events, whose signatures are checked by the openai package."""
        with OpenAI(api_key="unused", webhook_secret=secret) as client:
            posts = [request for request in self.requests if request.method == "POST"]
            events = [client.webhooks.unwrap(request.body, request.headers) for request in posts]
        return [(event.type, event.data.id) for event in events]


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return make_chain(tmp_path_factory.mktemp("tls"), HOST, host=True)


@pytest.fixture(scope="module")
def shared_receiver(chain: Chain) -> Iterator[Receiver]:
    with Receiver(chain).running() as receiver:
        yield receiver


@pytest.fixture
def receiver(shared_receiver: Receiver) -> Receiver:
    shared_receiver.requests.clear()
    shared_receiver.status = 200
    return shared_receiver


@contextmanager
def sending_server(chain: Chain, receiver: Receiver, folder: Path) -> Iterator[RunningServer]:
    """Run a server for which ``HOST`` has a public address that leads to ``receiver``."""
    folder.mkdir(parents=True, exist_ok=True)
    launcher = folder / "launch.py"
    launcher.write_text(LAUNCH)
    command = [str(launcher), str(chain.root), str(receiver.port)]
    with running_server(Path("embedded"), folder, config=CONFIG, command=command) as server:
        server.wait_until_ready()
        yield server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hooks")


@pytest.fixture(scope="module")
def server(chain: Chain, shared_receiver: Receiver, folder: Path) -> Iterator[RunningServer]:
    with sending_server(chain, shared_receiver, folder) as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[Client]:
    with Client(server.url) as client:
        yield client


@pytest.fixture
def endpoint(client: Client) -> Iterator[WebhookEndpoint]:
    created = client.create_webhook_endpoint("mine", f"https://{HOST}/hook?a=b", EVENTS)
    yield created
    client.delete_webhook_endpoint(created.id)


def until(condition: Callable[[], Any], what: str) -> None:
    wait_for(condition, SOON_S, what)


class TestOutgoing:
    """Signatures and address rules, without a server."""

    def send(self, chain: Chain, receiver: Receiver, tmp_path: Path, address: str = PUBLIC, old: bool = False) -> Any:
        table = WebhookEndpoints(Database(tmp_path))
        endpoint = table.add("", "mine", f"https://{HOST}/hook", EVENTS)
        if old:
            rotated = table.rotate_secret(endpoint.id, keeps_old=True)
            assert rotated is not None

        async def connect(_: str, __: int, **options: Any) -> Any:
            return await asyncio.open_connection("127.0.0.1", receiver.port, **options)

        context = ssl.create_default_context(cafile=chain.root)
        client = OutgoingClient([HOST], resolve=lambda *_: [address], connect=connect, context=context)
        current = table.get(endpoint.id)
        assert current is not None
        status = asyncio.run(send_event(client, current, "evt_1", b'{"id":"evt_1","type":"job.succeeded","data":{}}'))
        return status, endpoint, current

    def test_both_secrets_are_valid_after_a_rotation(self, chain: Chain, receiver: Receiver, tmp_path: Path) -> None:
        status, old, new = self.send(chain, receiver, tmp_path, old=True)
        assert (status, old.secret == new.secret) == (200, False)
        (request,) = receiver.requests
        assert request.headers["webhook-id"] == "evt_1"
        with OpenAI(api_key="unused") as client:
            for secret in (old.secret, new.secret):
                client.webhooks.verify_signature(request.body, request.headers, secret=secret_text(secret))
            with pytest.raises(InvalidWebhookSignatureError):
                client.webhooks.verify_signature(request.body, request.headers, secret=secret_text(bytes(32)))
            with pytest.raises(InvalidWebhookSignatureError):
                client.webhooks.verify_signature(request.body + b" ", request.headers, secret=secret_text(new.secret))

    def test_a_private_address_is_never_contacted(self, chain: Chain, receiver: Receiver, tmp_path: Path) -> None:
        with pytest.raises(DeliveryError, match="not on the public internet"):
            self.send(chain, receiver, tmp_path, address="127.0.0.1")
        assert receiver.requests == []

    def test_a_redirect_is_not_followed(self, chain: Chain, receiver: Receiver, tmp_path: Path) -> None:
        receiver.status = 302
        assert self.send(chain, receiver, tmp_path)[0] == 302
        assert len(receiver.requests) == 1


def test_hanging_endpoints_of_a_key_do_not_delay_those_of_others(tmp_path: Path) -> None:
    database = Database(tmp_path)
    endpoints, slow, quick = WebhookEndpoints(database), "slow.example.org", "quick.example.org"
    for number in range(MAX_AT_ONCE + 2):
        endpoints.add("key-1", f"slow {number}", f"https://{slow}/hook", EVENTS)
    endpoints.add("key-2", "quick", f"https://{quick}/hook", EVENTS)
    for owner in ("key-1", "key-2"):
        endpoints.add_event(owner, "job.succeeded", "one")
    num_ended = 0

    async def deliver() -> int:
        arrived = asyncio.Event()

        async def connect(address: str, _: int, **__: Any) -> Any:
            nonlocal num_ended
            if address != OTHER_PUBLIC:
                try:
                    await asyncio.Event().wait()
                finally:
                    num_ended += 1
            arrived.set()
            raise OSError

        hooks = OutgoingClient(
            [slow, quick], resolve=lambda host, _: [PUBLIC if host == slow else OTHER_PUBLIC], connect=connect
        )
        runner = DeliveryRunner(
            Deliveries(database),
            endpoints,
            Jobs(database),
            Owners(load_settings(env={}).serve, None),
            hooks,
            OutgoingClient([]),
        )
        running = asyncio.create_task(runner.run_for_ever())
        async with asyncio.timeout(SOON_S):
            await arrived.wait()
        num_before = num_ended
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return num_before

    assert asyncio.run(deliver()) == 0
    assert 0 < num_ended <= MAX_AT_ONCE


def secret_text(secret: bytes) -> str:
    return f"whsec_{base64.b64encode(secret).decode()}"


@pytest.mark.slow
def test_events_of_jobs_responses_and_batches_arrive(
    server: RunningServer, client: Client, endpoint: WebhookEndpoint, receiver: Receiver
) -> None:
    job = client.begin_job(GENERATIONS, BODY)
    tools = [{"type": "image_generation", "size": "64x64", "num_inference_steps": 2}]
    fields = {"input": "a red fox", "tools": tools, "background": True}
    response = server.client.post("/v1/responses", json=fields).json()
    foreground = server.client.post("/v1/responses", json=fields | {"background": False})
    assert foreground.status_code == 200
    line = json.dumps({"custom_id": "a", "method": "POST", "url": GENERATIONS, "body": BODY}) + "\n"
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused") as openai:
        file = openai.files.create(file=("a.jsonl", line.encode()), purpose="batch")
        batch = openai.batches.create(
            input_file_id=file.id,
            endpoint=GENERATIONS,
            completion_window="24h",
        )
    until(lambda: len(receiver.requests) == 3, "three events")
    expected = {("job.succeeded", job.id), ("response.completed", response["id"]), ("batch.completed", batch.id)}
    assert set(receiver.events(endpoint.signing_secret)) == expected
    request = receiver.requests[0]
    assert (request.path, request.headers["host"], request.headers["content-type"]) == (
        "/hook?a=b", HOST, "application/json",
    )  # fmt: skip


@pytest.mark.slow
def test_a_failed_delivery_is_repeated_and_gone_disables(
    server: RunningServer, client: Client, endpoint: WebhookEndpoint, receiver: Receiver
) -> None:
    receiver.status = 503
    job = client.begin_job(GENERATIONS, BODY)
    until(lambda: len(receiver.requests) >= 2, "a second attempt")
    assert client.webhook_endpoint(endpoint.id).last_error == "the endpoint answered 503."
    receiver.status = 204
    until(lambda: client.webhook_endpoint(endpoint.id).last_error is None, "the delivery")
    assert set(receiver.events(endpoint.signing_secret)) == {("job.succeeded", job.id)}
    (webhook_id,) = {request.headers["webhook-id"] for request in receiver.requests}
    lines = [json.loads(line) for line in server.errors.read_text().splitlines() if webhook_id in line]
    assert {(line["event"], line["webhook_id"]) for line in lines} == {("a delivery failed", webhook_id)}
    receiver.status = 410
    client.begin_job(GENERATIONS, BODY)
    until(lambda: not client.webhook_endpoint(endpoint.id).is_enabled, "the end of the events")
    assert "410" in (client.webhook_endpoint(endpoint.id).last_error or "")
    assert client.update_webhook_endpoint(endpoint.id, name="again").is_enabled


@pytest.mark.slow
def test_a_sample_event_and_the_routes_of_openai(
    server: RunningServer, endpoint: WebhookEndpoint, receiver: Receiver
) -> None:
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as openai:
        types = openai.webhooks.event_types.list().data
        assert {"batch.completed", "response.failed", "job.succeeded"} <= set(types)
        created = openai.webhooks.create(
            name="b", url=f"https://{HOST}/b", event_types=["batch.completed", "batch.completed"]
        )
        assert created.signing_secret.startswith("whsec_")
        assert (created.event_types, created.updated_at) == (["batch.completed"], created.created_at)
        assert created.signing_secret.rstrip("=").endswith((created.signing_secret_hint or "x")[-4:])
        assert [entry.id for entry in openai.webhooks.list(limit=1)] == [created.id, endpoint.id]
        shown = openai.webhooks.retrieve(created.id)
        assert "signing_secret" not in shown.model_dump()
        assert openai.webhooks.update(created.id, event_types=["batch.failed"]).event_types == ["batch.failed"]
        rotated = openai.webhooks.rotate_secret(created.id)
        assert rotated.signing_secret != created.signing_secret
        receiver.status = 418
        result = openai.webhooks.test(created.id, event_type="batch.failed")
        assert (result.status_code, result.success, result.event_type) == (418, True, "batch.failed")
        assert [kind for kind, _ in receiver.events(rotated.signing_secret)] == ["batch.failed"]
        assert openai.webhooks.delete(created.id).deleted


@pytest.mark.slow
def test_a_key_sends_one_sample_event_at_a_time(
    server: RunningServer, endpoint: WebhookEndpoint, receiver: Receiver
) -> None:
    def send() -> httpx.Response:
        return server.client.post(f"{ENDPOINTS}/{endpoint.id}/test", json={"event_type": "job.failed"}, timeout=SOON_S)

    receiver.may_answer.clear()
    try:
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(send)
            until(lambda: receiver.requests, "the sample event")
            second = send()
            receiver.may_answer.set()
            assert first.result().status_code == 200
    finally:
        receiver.may_answer.set()
    assert (second.status_code, error_of(second)["code"]) == (409, "test_running")
    assert send().status_code == 200


@pytest.mark.slow
def test_the_documented_example_creates_an_endpoint(server: RunningServer, client: Client) -> None:
    (example,) = (block.text for block in blocks("python", DOCS / "http.md") if "webhooks.create" in block.text)
    example = example.replace("https://images.example.com", server.url).replace("hooks.example.org", HOST)
    variables: dict[str, Any] = {}
    exec(example, variables)
    created = client.webhook_endpoint(variables["endpoint"].id)
    assert (created.name, created.event_types) == ("mine", ("batch.completed", "job.succeeded"))
    client.delete_webhook_endpoint(created.id)


@pytest.mark.slow
def test_the_result_of_a_job_is_uploaded(client: Client, receiver: Receiver) -> None:
    url = f"https://{HOST}/bucket/a.json?X-Amz-Signature={'0' * 1000}&b=c%2Fd"
    receiver.status = 500
    job = client.begin_job(GENERATIONS, BODY, put_url=url)
    assert job.output is not None
    assert (job.output.put_url, job.output.status, job.output.error) == (url.partition("?")[0], "waiting", None)
    until(lambda: output_of(client, job.id).error, "a failed attempt")
    receiver.status = 200
    until(lambda: output_of(client, job.id).status == "delivered", "the upload")
    upload = receiver.requests[-1]
    assert (upload.method, upload.path, upload.headers["content-type"]) == (
        "PUT", url.partition(HOST)[2], "application/json",
    )  # fmt: skip
    assert upload.body == client.job_result(job.id)
    receiver.status = 403
    refused = client.begin_job(GENERATIONS, BODY, put_url=url)
    until(lambda: output_of(client, refused.id).status == "failed", "the end of the attempts")
    assert output_of(client, refused.id).error == "the host of put_url answered 403."
    assert client.job_result(refused.id)


def output_of(client: Client, name: str) -> Any:
    job = client.job(name)
    assert job.output is not None
    return job.output


BAD_URLS = [
    "", "x", 1, None, [], f"http://{HOST}/", "https://127.0.0.1/", "https://10.0.0.1/", "https://other.example.org/",
    f"https://user@{HOST}/", f"https://user:secret@{HOST}/", f"https://{HOST}:8443/", f"https://{HOST}.evil.test/",
    f"https://{HOST}\\@evil.test/", f"https://{HOST}/\r\nX: y", f"ftp://{HOST}/", f"https://{HOST}/" + "a" * 4000,
    f"https://{HOST}/ä", "https://[::1]/",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("url", BAD_URLS, ids=lambda url: str(url)[:40])
def test_a_bad_url_is_refused(server: RunningServer, endpoint: WebhookEndpoint, url: Any) -> None:
    fields = {"name": "a", "url": url, "event_types": ["job.failed"]}
    answers = [server.client.post(ENDPOINTS, json=fields)]
    if url is not None:
        answers.append(server.client.post(f"{ENDPOINTS}/{endpoint.id}", json={"url": url}))
    output = {"put_url": url}
    answers.append(server.client.post(JOBS, json={"endpoint": GENERATIONS, "body": BODY, "output": output}))
    for answer in answers:
        assert answer.status_code == 400, answer.text
        error = error_of(answer)
        assert error["param"] in ("url", "output.put_url")
        assert error["code"] in (
            "url_not_allowed",
            "invalid_value",
            "empty_url",
            "empty_put_url",
            "string_above_max_length",
        )
        assert error["message"].endswith(".")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "param", "part"),
    [
        ({"event_types": []}, "event_types", "event_types"),
        ({"event_types": ["job.done"]}, "event_types[0]", "job.done"),
        ({"event_types": "job.failed"}, "event_types", "job.failed"),
        ({"event_types": ["job.failed"] * 65}, "event_types", "64"),
        ({"event_types": ...}, "event_types", "webhook_event_types"),
        ({"name": ""}, "name", "name"),
        ({"name": "a" * 257}, "name", "256"),
        ({"name": ...}, "name", "name"),
        ({"url": ...}, "url", "url"),
    ],
)
def test_a_bad_endpoint_is_refused(server: RunningServer, fields: dict[str, Any], param: str, part: str) -> None:
    merged = {"name": "a", "url": f"https://{HOST}/", "event_types": ["job.failed"]} | fields
    answer = server.client.post(ENDPOINTS, json={name: value for name, value in merged.items() if value is not ...})
    assert (answer.status_code, error_of(answer)["param"]) == (400, param), answer.text
    assert part in error_of(answer)["message"]


@pytest.mark.slow
def test_odd_outputs_and_unknown_endpoints_are_refused(server: RunningServer, client: Client) -> None:
    url = f"https://{HOST}/"
    outputs: list[Any] = ["x", 1, [], {}, {"put_url": url, "get_url": "x"}, {"url": url}]
    for output in outputs:
        answer = server.client.post(JOBS, json={"endpoint": GENERATIONS, "body": BODY, "output": output})
        assert answer.status_code == 400, output
        assert error_of(answer)["param"].startswith("output")
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", ""), ("POST", "/rotate_secret"), ("POST", "/test")):
        answer = server.client.request(method, f"{ENDPOINTS}/we_none{path}", json={"event_type": "job.failed"})
        assert (answer.status_code, error_of(answer)["code"]) == (404, "webhook_endpoint_not_found"), path
    assert not client.delete_webhook_endpoint("we_none")


@pytest.mark.slow
def test_a_killed_server_delivers_after_its_restart_and_keys_are_separate(
    chain: Chain, receiver: Receiver, tmp_path: Path
) -> None:
    first, _ = Keys(Database(tmp_path / "data")).add("first")
    second, _ = Keys(Database(tmp_path / "data")).add("second")
    receiver.status = 500
    with sending_server(chain, receiver, tmp_path) as server, Client(server.url, api_key=first) as client:
        endpoint = client.create_webhook_endpoint("mine", f"https://{HOST}/hook", EVENTS)
        with Client(server.url, api_key=second) as other:
            assert other.webhook_endpoints().data == ()
            with pytest.raises(InvalidRequest, match="no webhook endpoint"):
                other.webhook_endpoint(endpoint.id)
            assert not other.delete_webhook_endpoint(endpoint.id)
            other_job_id = other.begin_job(GENERATIONS, BODY).id
            until(lambda: other.job(other_job_id).is_over, "the job of the other key")
        body = BODY | {"response_format": "url"}
        job = client.begin_job(GENERATIONS, body, put_url=f"https://{HOST}/bucket/a")
        until(lambda: {request.method for request in receiver.requests} == {"POST", "PUT"}, "attempts")
        server.process.kill()
        server.process.wait()
    receiver.requests.clear()
    receiver.status = 200
    with sending_server(chain, receiver, tmp_path) as server, Client(server.url, api_key=first) as client:
        until(lambda: {request.method for request in receiver.requests} == {"POST", "PUT"}, "deliveries")
        until(lambda: output_of(client, job.id).status == "delivered", "the upload")
        assert set(receiver.events(endpoint.signing_secret)) == {("job.succeeded", job.id)}
        upload = next(request for request in receiver.requests if request.method == "PUT")
        assert upload.body == client.job_result(job.id)
        url = json.loads(upload.body)["data"][0]["url"]
        picture = server.client.get(f"/v1/{url.partition('/v1/')[2]}")
        assert picture.headers["content-type"] == "image/png"
        assert url.startswith("http://127.0.0.1:")


@pytest.mark.slow
def test_webhooks_are_off_by_default(tmp_path: Path) -> None:
    with running_server(Path("embedded"), tmp_path) as server:
        fields = {"name": "a", "url": f"https://{HOST}/", "event_types": ["job.failed"]}
        output = {"put_url": f"https://{HOST}/"}
        answers = {
            "webhook_hosts": server.client.post(ENDPOINTS, json=fields),
            "upload_hosts": server.client.post(JOBS, json={"endpoint": GENERATIONS, "body": BODY, "output": output}),
        }
        for setting, answer in answers.items():
            assert (answer.status_code, error_of(answer)["code"]) == (400, "url_not_allowed")
            assert f"[serve] {setting}" in error_of(answer)["message"]
