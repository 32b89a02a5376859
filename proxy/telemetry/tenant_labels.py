"""Tenants as metric labels: a bounded number of series, whatever the key file says."""

from collections.abc import Iterable

MOST = 50
OTHER, NONE = "other", "none"


class TenantLabels:
    """Configured tenants keep their names; of the rest the first few seen do, others share one.

    A name once given as a label stays one: series must not change their meaning.
    """

    def __init__(self, configured: Iterable[str], most: int = MOST) -> None:
        self._labels = {"": NONE}
        self._room = most
        self.configure(configured)

    def configure(self, configured: Iterable[str]) -> None:
        """These have names of their own from now on; who had one keeps it."""
        self._labels.update((name, name) for name in configured)

    def label(self, tenant: str) -> str:
        """What `tenant` is called in metrics; "" (no keys) is `none`."""
        label = self._labels.get(tenant)
        if label is None:
            if not self._room:
                return OTHER
            self._room -= 1
            label = self._labels[tenant] = tenant
        return label
