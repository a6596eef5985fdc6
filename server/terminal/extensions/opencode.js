// A plugin of OpenCode: https://opencode.ai/docs/plugins/

delete process.env.npm_config_fetch_retries; // `rootstock launch` sets it for the start alone

export default async ({ directory }) => ({
  config: async config => {
    config.provider.rootstock.options.fetch = (url, request) => {
      const body = withFolderAfterTools(JSON.parse(request.body), directory);
      return fetch(url, { ...request, body: JSON.stringify(body) });
    };
  },
});
