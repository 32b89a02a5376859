"""The admin port of a proxy with several workers: combines the workers' own admin ports.

`/metrics` has the series of all workers, with a label `worker`. Prometheus can sum them. A worker
that does not answer in time is left out and reported as down.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any
from urllib.parse import quote

import aiohttp
import orjson
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from forebay.proxy.admin.port import (
    named_backend,
    query_of,
    refusal_of,
    requested_id,
    seconds_ago,
    wrong_request,
)
from forebay.proxy.admin.request_list import DEFAULT_ROWS, by_count, ordered, outcomes_of_all
from forebay.proxy.admin.watch import of_all_workers
from forebay.proxy.http1.error_response import error_response, json_response
from forebay.proxy.http1.errors import SERVER, ApiError, error_body
from forebay.proxy.http1.headers import request_id
from forebay.proxy.http1.server.byte_budget import ByteBudget, RequestMemory
from forebay.proxy.http1.server.client_body import read_client_body
from forebay.proxy.workers.worker_histories import added_up
from forebay.proxy.workers.workers import Worker, WorkerPool

ANSWER_S, RELOAD_S = 2.0, 60.0  # a reload ends only after its new backends are probed
BODY_BYTES, BODY_S = 64 << 20, 30.0  # limits of a preview's body; a worker's are lower
PASSED = ("x-forebay-class", "x-request-timeout")  # headers that decide about a request
RETELL_S = 1.0  # longest time in which a restarted worker sends work to a drained backend
NO_HEADERS: Mapping[str, str] = {}


class WorkersAdmin:
    """Handles the requests of the admin port. Use as a context."""

    def __init__(self, workers: WorkerPool) -> None:
        self._workers = workers
        self._started_at = time.monotonic()
        self._budget = ByteBudget(2 * BODY_BYTES)
        self._drained: set[str] = set()  # paths that were POSTed
        self._session: aiohttp.ClientSession
        self._telling: asyncio.Task[None]

    async def __aenter__(self) -> "WorkersAdmin":
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S))
        self._telling = asyncio.create_task(self._keep_drained(), name="drained backends")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._telling.cancel()
        await asyncio.gather(self._telling, return_exceptions=True)
        await self._session.close()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if (refusal := refusal_of(request)) is not None:
            return refusal
        match request.method, request.raw_path.partition("?")[0]:
            case "GET" | "HEAD", "/healthz":
                return web.Response(text="ok\n")
            case "GET" | "HEAD", "/readyz":
                return await self._readiness()
            case "GET", "/metrics":
                text = generate_latest(await self._registry(seconds_ago(request)))
                return web.Response(
                    body=text, headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"}
                )
            case "GET", "/status" if (id_ := requested_id(request)) is not None:
                return await self._combined(f"/status?request={quote(id_, safe='')}", latest_of)
            case "GET", "/status":
                return json_response(await self._status())
            case "GET", "/history":
                return await self._combined(request.raw_path, added_up)
            case "GET", "/requests":
                return await self._combined(request.raw_path, partial(one_list, request))
            case "GET", "/backends":
                return await self._first("GET", request.raw_path)
            case "POST", "/preview":
                return await self._preview(request)
            case "POST", path if (named := named_backend(path)) is not None:
                return await self._drain_one(path, named[1], request.raw_path)
            case "GET", "/":
                return web.Response(text=self._page(), content_type="text/html", charset="utf-8")
            case "POST", "/drain":
                self._workers.stop.set()
                return web.Response(status=202, text="draining\n")
            case "POST", "/reload":
                return await self._reload()
        return wrong_request(request)

    async def _readiness(self) -> web.Response:
        """Answer 200 if a worker is ready and each that gets connections responds."""
        answers = await self._ask("/readyz")
        ready = [i for i, (status, _) in answers.items() if status == 200]
        silent = sum(worker.silent for worker in self._workers.workers)
        alive = bool(ready) and not silent and not self._workers.stopping
        hang = f", {silent} do not respond" if silent else ""
        return web.Response(
            status=200 if alive else 503,
            text=f"ready: {len(ready)} of {self._workers.count} workers{hang}\n",
        )

    async def _reload(self) -> web.Response:
        """Answer with the result of a reload in each worker."""
        answers = await self._ask("/reload", "POST", RELOAD_S)
        if not answers:
            return _no_answer(answers)
        said = {i: body.decode() for i, (_, body) in answers.items()}
        same = len(set(said.values())) == 1 and len(said) == self._workers.count
        lines = [f"worker {i}: {text}" for i, text in said.items()]
        status = max(status for status, _ in answers.values())
        return web.Response(
            status=status, text=next(iter(said.values())) if same else "".join(lines)
        )

    async def _drain_one(self, path: str, state: str, target: str) -> web.Response:
        """Take a backend out of use in each worker, or back. Workers that start later follow."""
        answers = await self._ask(target, "POST")
        good = [orjson.loads(body) for status, body in answers.values() if status == 200]
        if not good:
            status, body = next(iter(answers.values()), (0, b""))
            if status == 404:
                return json_response(body, 404)
            return _no_answer(answers)
        if state == "drain":
            self._drained.add(path)
        else:
            self._drained.discard(path.removesuffix(state) + "drain")
        fields = {**good[0], "in_flight": sum(answer["in_flight"] for answer in good)}
        return json_response(fields)

    async def _keep_drained(self) -> None:
        """Tell workers that have started since which backends are out of use."""
        while True:
            await asyncio.sleep(RETELL_S)
            for path in list(self._drained):
                await self._ask(path, "POST")

    async def _combined(
        self, target: str, combine: Callable[[dict[int, Any]], dict[str, Any]]
    ) -> web.Response:
        """Answer with one object, made of the objects of all workers that have one."""
        answers = await self._ask(target)
        good = {i: orjson.loads(body) for i, (status, body) in answers.items() if status == 200}
        return json_response(combine(good)) if good else _no_answer(answers)

    async def _preview(self, request: web.BaseRequest) -> web.Response:
        """Answer with the decision about a body by the first worker that responds."""
        try:
            with RequestMemory(self._budget) as memory:
                memory.holder = "preview"
                body = await read_client_body(request, BODY_BYTES, BODY_S, memory)
                return await self._first("POST", request.raw_path, body, request.headers)
        except ApiError as error:
            return error_response(error, request_id(request.headers))

    async def _first(
        self, method: str, target: str, body: bytes = b"", headers: Mapping[str, str] = NO_HEADERS
    ) -> web.Response:
        """Ask the workers one after the other. Returns the first answer."""
        passed = {name: headers[name] for name in PASSED if name in headers}
        for worker in self._workers.workers:
            if worker.admin_url is None:
                continue
            try:
                call = self._session.request(
                    method, worker.admin_url + target, data=body or None, headers=passed
                )
                async with call as answer:
                    return json_response(await answer.read(), answer.status)
            except (aiohttp.ClientError, OSError, TimeoutError):
                continue
        return _no_answer({})

    async def _ask(
        self, path: str, method: str = "GET", within_s: float = ANSWER_S
    ) -> dict[int, tuple[int, bytes]]:
        """Return status and body of each worker that responds in time."""
        limit = aiohttp.ClientTimeout(within_s)

        async def ask_worker(worker: Worker) -> tuple[int, bytes] | None:
            if worker.admin_url is None:
                return None
            try:
                call = self._session.request(method, worker.admin_url + path, timeout=limit)
                async with call as response:
                    return response.status, await response.read()
            except (aiohttp.ClientError, OSError, TimeoutError):
                return None

        workers = self._workers.workers
        answers = await asyncio.gather(*(ask_worker(worker) for worker in workers))
        return {
            worker.index: answer for worker, answer in zip(workers, answers, strict=True) if answer
        }

    async def _status(self) -> dict[str, Any]:
        answers = await self._ask("/status")
        statuses = {i: orjson.loads(body) for i, (status, body) in answers.items() if status == 200}
        hub = self._workers.hub
        return {
            "ready": any(status["ready"] for status in statuses.values()),
            "draining": self._workers.stopping,
            "uptime_s": round(time.monotonic() - self._started_at, 1),
            "hub": {
                "relayed": hub.relayed,
                "relayed_bytes": hub.relayed_bytes,
                "dropped": hub.dropped,
            },
            "workers": [
                {
                    "worker": worker.index,
                    "pid": worker.pid,
                    "admin_url": worker.admin_url,
                    "restarts": max(0, worker.starts - 1),
                    "status": statuses.get(worker.index),
                }
                for worker in self._workers.workers
            ],
        }

    async def _registry(self, ago_s: float | None) -> CollectorRegistry:
        query = "" if ago_s is None else f"?ago={ago_s:.0f}"
        answers = await self._ask(f"/metrics{query}")
        texts = {i: body.decode() for i, (status, body) in answers.items() if status == 200}
        up = GaugeMetricFamily("forebay_worker_up", "1 if the worker responds", labels=["worker"])
        restarts = CounterMetricFamily(
            "forebay_worker_restarts", "Number of times the worker died", labels=["worker"]
        )
        for worker in self._workers.workers:
            up.add_metric([str(worker.index)], float(worker.index in texts))
            restarts.add_metric([str(worker.index)], float(max(0, worker.starts - 1)))
        registry = CollectorRegistry()
        registry.register(_Collected([up, restarts, *merged(texts)]))
        return registry

    def _page(self) -> str:
        rows = [
            f'<li><a href="{w.admin_url}/">worker {w.index}</a></li>'
            for w in self._workers.workers
            if w.admin_url
        ]
        return (
            "<!doctype html><title>Forebay</title><h1>Forebay: workers</h1>"
            f'<ul>{"".join(rows)}</ul><p><a href="status">status</a> <a href="metrics">metrics</a>'
        )


def latest_of(receipts: dict[int, Any]) -> dict[str, Any]:
    """Return the decisions of the worker that had the request, the latest of several."""
    latest = min(receipts, key=lambda index: receipts[index]["age_s"])
    same_id = [receipts[i]["request"] for i in receipts if i != latest]
    same_id += receipts[latest]["same_id"]
    return {**receipts[latest], "same_id": same_id, "worker": latest}


def one_list(request: web.BaseRequest, parts: dict[int, Any]) -> dict[str, Any]:
    """Return the requests of all workers in one order."""
    lists = list(parts.values())
    rows = [{**row, "worker": i} for i, part in parts.items() for row in part["requests"]]
    count = int(float(query_of(request).get("count", [str(DEFAULT_ROWS)])[0]))
    sums: dict[str, Any] = {
        key: sum(part[key] for part in lists) for key in ("remembered", "considered", "unseen")
    }
    rejected = sum((Counter(part["by_tenant"]) for part in lists), Counter[str]())
    sums["by_tenant"] = by_count(rejected)
    sums["outcomes"] = outcomes_of_all([part["outcomes"] for part in lists])
    sums["findings"] = of_all_workers([part["findings"] for part in lists])
    return {**lists[0], **sums, "requests": ordered(rows, lists[0]["by"], count)}


def _no_answer(answers: Mapping[int, tuple[int, bytes]]) -> web.Response:
    """Return why there is no result: all workers give the same reason, or none responds."""
    for status, body in answers.values():
        return json_response(body, status)
    return json_response(error_body("No worker responds.", SERVER, "no_worker"), 503)


class _Collected:
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families


def merged(texts: dict[int, str]) -> list[Metric]:
    """Merge the expositions of several workers. Each sample gets the label `worker`."""
    families: dict[str, Metric] = {}
    for index, text in texts.items():
        for part in text_string_to_metric_families(text):
            family = families.setdefault(
                part.name, Metric(part.name, part.documentation, part.type)
            )
            for sample in part.samples:
                labels = {**sample.labels, "worker": str(index)}
                family.add_sample(sample.name, labels, sample.value)
    return list(families.values())
