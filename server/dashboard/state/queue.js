// How many sequences there are, with those that a snapshot only counts.

/** { running, waiting } */
export function queue({ requests, hidden_requests }) {
  const listed = requests.filter((request) => request.state === "running").length;
  return {
    running: listed + hidden_requests.running,
    waiting: requests.length - listed + hidden_requests.waiting,
  };
}
