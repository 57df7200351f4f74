"""A document that a person reviews by following a link: a web application whose handlers complete a deferred.

    pip install starlette uvicorn         # or keiro's extra `examples`
    python examples/webhook.py            # serves until Ctrl-C; then, in another terminal:
    curl -X PUT http://127.0.0.1:8000/documents/plan
    curl -d '{"verdict": "good"}' LINK    # the link that the first terminal prints
    curl http://127.0.0.1:8000/documents/plan

The link carries the token of the deferred: nobody can guess it, and whoever brings it back completes that one, in
whatever process the run goes on. The first answer counts, for good: so the handler looks at it before it hands it over.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import keiro

PORT = int(sys.argv[1]) if len(sys.argv) > 1 else 8000


@keiro.step
async def ask(document: str, token: str) -> None:
    """In earnest a mail to the reviewer."""
    print(f"review {document!r}: http://127.0.0.1:{PORT}/reviews/{token}", flush=True)


@keiro.step
async def publish(document: str, verdict: str) -> str:
    return f"{document} is {verdict}"


@keiro.workflow
async def review(run: keiro.WorkflowRun, document: str) -> str:
    verdict = run.deferred("verdict", str)
    await run.step(ask, document, await verdict.token())
    return await run.step(publish, document, await verdict.result(timeout=7 * 86_400))


engine = keiro.Engine("sqlite:///reviews.db", workflows=[review])


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    async with engine:
        yield


async def refused(request: Request, error: Exception) -> JSONResponse:
    """A run or a token that there is not. The messages of keiro's errors are for people, and say what to do."""
    return JSONResponse({"error": str(error)}, status_code=404)


async def submit(request: Request) -> JSONResponse:
    name = request.path_params["name"]
    handle = await engine.start(review, name, id=name)
    return JSONResponse({"run": handle.run_id}, status_code=202)


async def status(request: Request) -> JSONResponse:
    run = await engine.handle(f"wf:review-{request.path_params['name']}").run()
    return JSONResponse({"status": run.status, "result": run.result_json})


async def decide(request: Request) -> JSONResponse:
    try:
        verdict = (await request.json())["verdict"]
    except (ValueError, TypeError, KeyError):
        verdict = None
    if not isinstance(verdict, str):
        return JSONResponse({"error": 'send {"verdict": "..."}'}, status_code=400)
    first = await engine.complete(token=request.path_params["token"], value=verdict)
    return JSONResponse({"counted": first})


app = Starlette(
    lifespan=lifespan,
    exception_handlers={keiro.RunNotFound: refused, keiro.InvalidName: refused, keiro.RunConflict: refused},
    routes=[
        Route("/documents/{name}", submit, methods=["PUT"]),
        Route("/documents/{name}", status, methods=["GET"]),
        Route("/reviews/{token:path}", decide, methods=["POST"]),
    ],
)

if __name__ == "__main__":
    asyncio.run(uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=PORT, log_level="warning")).serve())
