#!/usr/bin/env bash
# Fails if users would wait longer with AFTER than with BEFORE: gate.sh BEFORE.yaml AFTER.yaml [OUT]
#
# Both configurations of the proxy get the same traffic in virtual time: seconds, without a GPU.
set -euo pipefail
before=$1 after=$2 out=${3:-runs/gate}
mkdir -p "$out"
# Better than this: traffic of your own, which `capture: {path: ...}` records without its text.
forebay traces synth chat-beside-documents --duration 300 --chat-rate 6 --document-rate 0.22 \
  -o "$out/trace.jsonl" --force
forebay simulate "$out/trace.jsonl" --config "$before" --gpus 2 --out "$out/before" --force
forebay simulate "$out/trace.jsonl" --config "$after" --gpus 2 --out "$out/after" --force
forebay report "$out/before" "$out/after" -o "$out/report.html" --force
forebay compare "$out/before" "$out/after" --fail-if-worse
