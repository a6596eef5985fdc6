// An extension of pi: https://pi.dev/docs/latest/extensions. `provider` is defined before it.

export default pi => {
  pi.registerProvider("rootstock", provider);
  pi.on("before_provider_request", ({ payload }, { cwd }) => withFolderAfterTools(payload, cwd));
};
