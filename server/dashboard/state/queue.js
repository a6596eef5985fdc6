// How many sequences there are, with those that a snapshot only counts.

/** { running, waiting, loading }: `waiting` includes `loading`. For hidden requests it is not known whether they load. */
export function queue({ requests, hidden_requests }) {
  const listed = (state) => requests.filter((request) => request.state === state).length;
  return {
    running: listed("running") + hidden_requests.running,
    waiting: requests.length - listed("running") + hidden_requests.waiting,
    loading: listed("loading"),
  };
}
