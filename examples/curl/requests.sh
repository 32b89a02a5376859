#!/usr/bin/env bash
# What a client sends and sees. Usage: requests.sh [BASE_URL]
set -euo pipefail
base=${1:-${OPENAI_BASE_URL:-http://127.0.0.1:8080/v1}}
model=$(curl -sf "$base/models" | grep -o '"id": *"[^"]*"' | head -n 1 | cut -d '"' -f 4)

echo "# a chat"
curl -sf "$base/chat/completions" -H 'content-type: application/json' \
  -d '{"model": "'"$model"'", "max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}]}'

printf '\n\n# the same as a stream, which arrives unchanged\n'
curl -sfN "$base/chat/completions" -H 'content-type: application/json' \
  -d '{"model": "'"$model"'", "max_tokens": 3, "stream": true, "messages": [{"role": "user", "content": "Hello"}]}'

printf '# a name for the request, and a deadline of 5 s for its first token: headers of the answer\n'
curl -sf -o /dev/null -D - "$base/completions" -H 'content-type: application/json' \
  -H 'x-request-id: my-request' -H 'x-request-timeout: 5' \
  -d '{"model": "'"$model"'", "max_tokens": 3, "prompt": "Hello"}'

echo "# a prompt that is too long for the server: its own answer, unchanged"
{ printf '{"model": "%s", "max_tokens": 3, "prompt": "' "$model"; head -c 800000 /dev/zero | tr '\0' a; printf '"}'; } |
  curl -s -w '\n%{http_code}\n' "$base/completions" -H 'content-type: application/json' -d @-
