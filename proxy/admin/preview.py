"""The JSON of `/preview`: the decision about a body, as if its tenant had sent it now."""

from typing import Any

from aiohttp import web

from forebay.proxy.app import App
from forebay.proxy.config.schema import Config
from forebay.proxy.core.model import Request
from forebay.proxy.diagnose.receipt_text import preview_verdict, receipt_fields
from forebay.proxy.services import Services


async def preview_fields(
    request: web.BaseRequest, tenant: str, *, services: Services, app: App, config: Config
) -> dict[str, Any]:
    """Return the JSON of `/preview`. Nothing is queued, sent or counted.

    Raises ApiError for a body that the public port would reject unread, or could not parse.
    """
    described = await app.parse_unsent(request, tenant)
    obstacle = _obstacle(described, tenant, services=services, app=app, config=config)
    now = services.driver.clock()
    services.driver.shaper.settle(now)
    receipt = services.driver.shaper.preview(described, now)
    fields = receipt_fields(receipt, now, services.receipts.keep)
    fields["request"] = "dry run"
    fields["accepted"] = receipt.state != "refused" and not obstacle
    fields["verdict"] = preview_verdict(receipt)
    if obstacle:
        fields["verdict"] = f"Would be rejected: {obstacle}."
    return fields


def _obstacle(
    described: Request, tenant: str, *, services: Services, app: App, config: Config
) -> str:
    """Return why such a request would not reach the policy, or ""."""
    if app.draining:
        return "the proxy is stopping"
    service_class = config.tenants.class_among_all(tenant, described.service_class)
    if services.protection.rejects(service_class):
        return f"the proxy is overloaded and sheds requests of class {service_class}"
    return ""
