"""Read the bodies that clients send, as far as decisions depend on them.

In reading order: public_paths (which paths exist), body (a shaped request), dialects (the
differences between the APIs), fields (single fields), prompt_text (a prompt as bytes), media_tokens
(images, sound and video), block_hashes (equal prefixes), token_estimate (bytes into tokens),
cache_salt (tenants apart in vLLM's cache), response_ids (tenants apart in kept responses),
json_body (bytes into fields, a large body in steps), unshaped_body (a request that is not shaped),
rejections (the words of a 429).

May import config, http1, the values of core, and of backends the models and the field of the salt.
"""
