"""Messages, tools and requests in OpenAI's format."""

from typing import Any


class LimitsUsedUp(RuntimeError):
    """Raised if the server refuses a request, because the limits of the trajectory are used up."""


def user_message(text: str) -> list[dict[str, Any]]:
    """Return a conversation of one user message."""
    return [{"role": "user", "content": text}]


def tool_schema(name: str, description: str | None, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the description of a tool for the policy."""
    function = {"name": name, "description": description or name, "parameters": parameters}
    return {"type": "function", "function": function}


async def complete(
    base_url: str, api_key: str, messages: list[dict[str, Any]], *, model: str = "policy", **options: Any
) -> dict[str, Any]:
    """Return an OpenAI-compatible server's next message. `options` are further fields of the request.

    Raises LimitsUsedUp if the limits of the trajectory are used up, and RuntimeError if the request fails
    otherwise.
    """
    import aiohttp

    address = f"{base_url.rstrip('/')}/chat/completions"
    request = {"model": model, "messages": messages, **options}
    headers = {"Authorization": f"Bearer {api_key}"}
    timeout = aiohttp.ClientTimeout(total=None)  # the worker's limit on the call applies
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(address, json=request, headers=headers) as response,
    ):
        if response.status != 200:
            text = await response.text()
            error = LimitsUsedUp if '"limits_used_up"' in text else RuntimeError
            raise error(f"{address}: status={response.status}: {text[:500]}")
        return (await response.json())["choices"][0]["message"]
