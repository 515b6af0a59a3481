//! The control socket: how a running `ssi-hv run` or `ssi-hv node` is asked and told things.
//!
//! Each such process listens on a Unix socket in a directory of its user ([`directory`]), and
//! speaks HTTP/1.1 there. What can be asked is a table ([`route::Route`]): a method, a path and a
//! function; `docs/openapi.json` is the same table for readers. Messages other than answers are in
//! [`protocol`], with all limits.
//!
//! # Whom it can hold up
//!
//! One thread speaks HTTP ([`server`]), with a bounded number of connections, and a deadline for
//! each step of each. It runs no function of the table: two threads do that for what only looks, and
//! one for what changes something, all there from the start. No thread of the machine or of the
//! pager ever waits for a client. Guest memory is never touched from here: a touch could wait for
//! the network.
//!
//! A request may wait until something has changed ([`changes`]). It waits on the thread that speaks HTTP,
//! which goes on meanwhile, and holds no place but that of its connection; few may do so at once.
//!
//! One request that changes something is carried out at a time; another is refused meanwhile, not
//! queued, since its sender could not know what it would apply to. Ending the VM by force is never
//! refused.

mod accept;
pub mod changes;
pub mod client;
pub mod directory;
pub mod files;
pub mod protocol;
pub mod route;
pub mod server;
mod workers;

#[cfg(test)]
mod listening_tests;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod waiting_tests;
