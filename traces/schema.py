"""The public path of `TraceRequest`, which stands in `ground`."""

from forebay.traces.ground.schema import TraceRequest as TraceRequest
