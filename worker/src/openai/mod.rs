//! OpenAI's API: requests in, replies out. Knows no sockets and no engine thread.

pub mod reply;
pub mod request;
