"""Other proxies in front of the same backends: their reports, and the reports of this proxy."""

from collections.abc import Callable, Mapping

from forebay.proxy.core.model import HISTORY, Action
from forebay.proxy.core.policy_state import PolicyState, ignore
from forebay.proxy.core.state.backend import Backend
from forebay.proxy.core.state.elsewhere import BackendReport, Peers, ProxyReport
from forebay.proxy.core.steps import dispatch_all


class Peering:
    """Keeps the policy's view of other proxies.

    Attributes:
        peers: their reports.
        recent_use: the use of tenants that this proxy reports.
        spent_elsewhere: called with tenant, tokens and time when other proxies charge its budgets.
    """

    def __init__(self, state: PolicyState) -> None:
        self._state = state
        self.peers = Peers()
        self.recent_use = state.recent_use
        self.spent_elsewhere: Callable[[str, float, float], None] = ignore

    def reported(self, peer: str, report: ProxyReport, now: float) -> list[Action]:
        """Replace the last report of another proxy."""
        return self.reported_together({peer: report}, now)

    def reported_together(self, reports: Mapping[str, ProxyReport], now: float) -> list[Action]:
        """Replace the last reports of other proxies, by name."""
        state, peers = self._state.at(now), self.peers
        backends = state.backends
        peers.know(backends, now)
        for peer, report in reports.items():
            for name, tokens in peers.keep(peer, report, now).items():
                if tokens > 0.0 and name in backends:  # it may have been removed
                    backends[name].cache.crowd(tokens)
            for name in report.computed.keys() & backends.keys():
                for prompt in report.computed[name]:
                    backends[name].cache.heard(prompt, now)
        peers.sum_up(now)
        if used := peers.used():
            state.used_elsewhere(used, now)
            for name, use in used.items():
                self.spent_elsewhere(name, use.charged - use.refunded, now)
        return self.settle(now)

    def gone(self, peer: str, now: float) -> list[Action]:
        """Forget another proxy that has left."""
        self._state.at(now)
        return self.settle(now) if self.peers.gone(peer, now) else []

    def forget_silent(self, now: float) -> list[Action]:
        """Forget proxies without a report for SILENT_S. Call it about every 0.1 s."""
        actions: list[Action] = []
        for peer in self.peers.silent(now):
            actions += self.gone(peer, now)
        return actions

    def report(self, now: float) -> ProxyReport:
        """Return the work of this proxy, for other proxies. A computed prompt is reported once."""
        backends = self._state.at(now).backends
        lately = self.recent_use.lately(now)
        reports = {name: report_of(b, now) for name, b in backends.items()}
        computed, room = {}, 8 * HISTORY  # blocks; 22 KB of a message
        for name, backend in backends.items():
            if prompts := backend.cache.news(room):
                computed[name] = prompts
                room -= sum(map(len, prompts))
        return ProxyReport(reports, lately, computed)

    def settle(self, now: float) -> list[Action]:
        """Bring every backend up to date after a report, or after proxies or backends changed."""
        state, peers = self._state, self.peers
        backends, forecast, sharing = state.backends, state.forecast, len(peers) > 0
        if sharing != state.sharing:
            state.sharing = sharing
            forecast.share_with(peers if sharing else None)
            if not sharing:
                for backend in backends.values():
                    backend.share_with(None, now)
        if sharing:
            peers.know(backends, now)
        for backend in backends.values():
            if sharing and backend.elsewhere is None:
                backend.share_with(peers.elsewhere(backend.name), now)
            forecast.moved(backend)
        return dispatch_all(state, now)


def report_of(backend: Backend, now: float) -> BackendReport:
    """Return the work of this proxy on one backend, without the work of other proxies."""
    queue, worked = backend.prefill_queue, backend.worked
    return BackendReport(
        backlog_s=queue.own_backlog_s(now),
        running=backend.sequences + backend.passing,
        kv_tokens=backend.kv.held,
        longest_s=queue.longest_s(),
        load=backend.load.value(now),
        fresh_tokens=backend.fresh_tokens,
        work=backend.observer.work,
        prefills={bucket: count for bucket, count in queue.prefills_of.items() if count},
        queued_s={bucket: q.work_s for bucket, q in backend.queues.items() if len(q)},
        worked={bucket: worked[bucket].rate(now) for bucket in backend.queues},
        short_s=queue.own_short_s(now),
    )
