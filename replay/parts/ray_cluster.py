"""Connect to a Ray cluster, which is an extra: `pip install 'forebay[ray]'`."""

from typing import Any

from forebay.traces.ground.errors import InputError


def connect(address: str) -> Any:
    """Return the module `ray`, connected to the cluster at `address` until `ray.shutdown()`.

    Raises:
        InputError: Ray is not installed, or the cluster cannot be reached.
    """
    try:
        import ray
    except ImportError:
        raise InputError("--ray: Ray is not installed; pip install 'forebay[ray]'") from None
    try:
        if address == "local":  # a cluster of this machine alone, which no other can reach
            ray.init(log_to_driver=False, include_dashboard=False, _node_ip_address="127.0.0.1")
        else:
            ray.init(address=address, log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise InputError(f"--ray {address}: {str(error).splitlines()[0]}") from None
    return ray
