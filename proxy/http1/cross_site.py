"""Keep web pages from driving the admin port through the browser of somebody who reaches it.

The port has no keys, and a page may POST anywhere without being allowed to read the answer. What is
looked at is set by browsers and by no page; curl and scripts send none of it.
"""

from aiohttp import web

from forebay.proxy.http1 import errors
from forebay.proxy.http1.headers import request_id
from forebay.proxy.http1.server import error_response

OWN = ("same-origin", "none")  # none: typed or bookmarked


def refused(request: web.BaseRequest) -> web.Response | None:
    """403 for a POST that a page of another site had a browser send; else None."""
    if request.method != "POST":
        return None
    headers = request.headers
    host = headers.get("host", "").lower()
    # Browsers leave Sec-Fetch-Site out over plain HTTP to anything but localhost, so Origin counts
    # too. "null", of a page that hides where it is from, is nobody's own.
    own_origins = (f"http://{host}", f"https://{host}")
    sites = headers.getall("sec-fetch-site", ())
    origins = headers.getall("origin", ())
    if all(site in OWN for site in sites) and all(one.lower() in own_origins for one in origins):
        return None
    return error_response(errors.cross_site(), request_id(headers))
