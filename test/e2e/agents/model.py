"""A language model that plays a script: OpenAI's Responses and Chat Completions APIs on loopback."""
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Model:
    """Answers each request with the next step: (tool, arguments), or last words. How many results of
    tools a request carries says which step is next. `results` are those of the newest request."""

    def __init__(self, steps):
        self.steps, self.results, self.tools = steps, [], []
        model = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer = {"/v1/responses": model.responses, "/v1/chat/completions": model.chat}[self.path](request)
                body = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    def next(self, results):
        self.results = results
        return self.steps[len(results)]

    def responses(self, request):
        self.tools = [t.get("name") for t in request.get("tools", [])]
        step = self.next([i["output"] for i in request["input"] if i.get("type") == "function_call_output"])
        n = len(self.results)
        if isinstance(step, str):
            item = {"type": "message", "id": f"msg_{n}", "role": "assistant", "status": "completed",
                    "content": [{"type": "output_text", "text": step, "annotations": []}]}
        else:
            item = {"type": "function_call", "id": f"fc_{n}", "call_id": f"call_{n}", "status": "completed",
                    "name": step[0], "arguments": json.dumps(step[1])}
        return {"id": f"resp_{n}", "object": "response", "created_at": 1, "status": "completed", "model": request["model"],
                "output": [item], "parallel_tool_calls": False, "tool_choice": "auto", "tools": [],
                "usage": {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2,
                          "input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}}

    def chat(self, request):
        self.tools = [t["function"]["name"] for t in request.get("tools", [])]
        step = self.next([m["content"] for m in request["messages"] if m["role"] == "tool"])
        n = len(self.results)
        message, reason = {"role": "assistant", "content": step}, "stop"
        if not isinstance(step, str):
            reason, message = "tool_calls", {"role": "assistant", "content": None, "tool_calls": [
                {"id": f"call_{n}", "type": "function", "function": {"name": step[0], "arguments": json.dumps(step[1])}}]}
        return {"id": f"chat_{n}", "object": "chat.completion", "created": 1, "model": request["model"],
                "choices": [{"index": 0, "message": message, "finish_reason": reason}],
                "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}
