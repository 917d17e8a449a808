"""Lists flows, installs a rule for ten minutes, and follows events: docs/management.md."""
import json, socket, sys

vtld = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
vtld.connect(sys.argv[1] if len(sys.argv) > 1 else "/run/vtl/vtld.sock")

def ask(op, **fields):
    vtld.send(json.dumps({"op": op, "protocol": 1, **fields}).encode())
    answer = json.loads(vtld.recv(128 << 10) or b'{"ok": false, "error": "vtld has ended"}')
    if not answer["ok"]:
        raise SystemExit(answer["error"])
    return answer

last = ask("events", wait_ms=0)["last"]  # first, so that nothing is missed in between
for flow in ask("flow_list")["flows"]:
    print(flow["id"], flow["peer"], flow["sends_by"], flow["why"])
ask("rule_install", for_s=600, rule={"name": "far", "to": "198.51.100.0/24", "carrier": "best"})
while True:
    answer = ask("events", since=last, kinds=["flow", "rule"])
    last = answer["last"]
    for event in answer["events"]:
        print(event, flush=True)
