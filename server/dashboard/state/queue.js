// How many sequences there are, with those that a snapshot only counts.

/** { running, waiting, loading }: who is loading waits, too; of those only counted nobody knows. */
export function queue({ requests, hidden_requests }) {
  const listed = (state) => requests.filter((request) => request.state === state).length;
  return {
    running: listed("running") + hidden_requests.running,
    waiting: requests.length - listed("running") + hidden_requests.waiting,
    loading: listed("loading"),
  };
}
