"""Labels of tenants in metrics: their number is bounded, regardless of the key file."""

from collections.abc import Iterable

MOST = 50
OTHER, NONE = "other", "none"


class TenantLabels:
    """Gives configured tenants, and the first few others, labels of their own.

    The remaining tenants share one label. A label is never withdrawn: series must not change their
    meaning.
    """

    def __init__(self, configured: Iterable[str], most: int = MOST) -> None:
        self._labels = {"": NONE}
        self._room = most
        self.configure(configured)

    def configure(self, configured: Iterable[str]) -> None:
        """Give these tenants labels of their own. Existing labels stay."""
        self._labels.update((name, name) for name in configured)

    def label(self, tenant: str) -> str:
        """Return the label of a tenant. "" (no keys) is `none`."""
        label = self._labels.get(tenant)
        if label is None:
            if not self._room:
                return OTHER
            self._room -= 1
            label = self._labels[tenant] = tenant
        return label
