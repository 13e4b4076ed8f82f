//! What of OpenAI's API the router has to understand, and no more: what routing needs of a request body, and the usage
//! at the end of a reply. Everything else passes through unread.

pub mod scan;
pub mod usage;
