#!/usr/bin/env bash
# The studies hol, shared-document and saturation on a real vLLM, one GPU: make study-h200
#
# Each study is bounded in time and left out when its results are there already, so the command can
# be given again. Every study says itself when it is not to be believed. Settings, all optional:
#   MODEL   what vLLM serves            VLLM   the vllm command       GPU   its data sheet
#   OUT     folder of the results       FOREBAY   the forebay command
#   TARGET  URL of a server that runs already: nothing is started, hol has its chunk size only
set -euo pipefail
MODEL=${MODEL:-microsoft/Phi-3-mini-128k-instruct}
VLLM=${VLLM:-vllm}
FOREBAY=${FOREBAY:-forebay}
OUT=${OUT:-runs/study-h200}
GPU=${GPU:-h200}
TARGET=${TARGET:-}
CONTEXT=${CONTEXT:-122880}
PROMPT=${PROMPT:-120000}
DOCUMENT=${DOCUMENT:-60000}
LEVELS=${LEVELS:-1,2,4,8,16,32,64,128,256,512}
LIMIT=${LIMIT:-1800} # seconds a study may take
READY=${READY:-1200} # seconds a server may take to load
servers=()

stop() {
  for pid in "${servers[@]}"; do kill "$pid" 2>/dev/null || true; done
  for pid in "${servers[@]}"; do wait "$pid" 2>/dev/null || true; done
  servers=()
}
trap stop EXIT
trap 'exit 130' INT TERM

# serve PORT FLAGS...: a server with what the studies need of it, its log in OUT
serve() {
  local port=$1
  shift
  # shellcheck disable=SC2086  # VLLM may hold words
  $VLLM serve "$MODEL" --host 127.0.0.1 --port "$port" --max-model-len "$CONTEXT" \
    --max-num-seqs 256 --enable-prefix-caching --enable-prompt-tokens-details "$@" \
    >"$OUT/vllm-$port.log" 2>&1 &
  servers+=($!)
}

# ready PORT: wait until it answers, or say how its log ends
ready() {
  local pid=${servers[-1]} start=$SECONDS
  until curl -sf -o /dev/null "http://127.0.0.1:$1/health"; do
    if ! kill -0 "$pid" 2>/dev/null || ((SECONDS - start > READY)); then
      echo "study-h200: the server on port $1 did not start; the end of $OUT/vllm-$1.log:" >&2
      tail -n 5 "$OUT/vllm-$1.log" >&2
      exit 1
    fi
    sleep 2
  done
}

# study NAME WORDS...: run it within LIMIT, unless it is there
study() {
  local name=$1
  shift
  if [[ -e $OUT/$name/results.json ]]; then
    echo "study-h200: $name is there already, in $OUT/$name"
    return
  fi
  echo "study-h200: $name"
  # --force: what an unfinished one has left goes
  timeout "$LIMIT" "$FOREBAY" experiment "$name" --out "$OUT/$name" --force "$@"
}

mkdir -p "$OUT"
if [[ -n $TARGET ]]; then
  study hol --target "$TARGET" --prompt-tokens "$PROMPT"
  study shared-document --target "$TARGET" --document-tokens "$DOCUMENT"
  study saturation --target "$TARGET" --concurrency "$LEVELS"
else
  if [[ ! -e $OUT/hol/results.json ]]; then
    # Two servers share the GPU's memory; hol asks one after the other. The first takes a prompt
    # whole, the second in chunks.
    serve 8101 --gpu-memory-utilization 0.45 --max-num-batched-tokens "$CONTEXT"
    ready 8101
    serve 8102 --gpu-memory-utilization 0.45 --max-num-batched-tokens 2048
    ready 8102
    study hol --target http://127.0.0.1:8101 --target http://127.0.0.1:8102 --prompt-tokens "$PROMPT"
    stop
  fi
  if [[ ! -e $OUT/shared-document/results.json || ! -e $OUT/saturation/results.json ]]; then
    serve 8103 --gpu-memory-utilization 0.9 --max-num-batched-tokens 8192
    ready 8103
    study shared-document --target http://127.0.0.1:8103 --document-tokens "$DOCUMENT"
    study saturation --target http://127.0.0.1:8103 --gpu "$GPU" --concurrency "$LEVELS"
    stop
  fi
fi
echo "study-h200: plots in $OUT/hol/plot.svg, $OUT/shared-document/plot.svg, $OUT/saturation/plot.svg"
