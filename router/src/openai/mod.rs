//! What of OpenAI's API the router has to understand, and no more: what routing needs of a request body, JSON or a form, which members to change for engines that share prompts, which conversation it is of, where the events of a
//! stream end and its answer begins, how a stream that broke off is gone on with, and the usage at the end of a reply. Everything else passes through unread.

pub mod bounds;
pub mod continuation;
pub mod conversation;
pub mod events;
pub mod form;
pub mod members;
pub mod scan;
pub mod usage;
