//! The control socket: inspects and controls a running `ssi-hv run` or `ssi-hv node`.
//!
//! Each such process listens on a Unix socket in a directory of its user ([`directory`]), and
//! serves HTTP/1.1 there. The requests are a table ([`route::Route`]) of methods, paths and
//! functions; `docs/openapi.json` documents the same table. [`protocol`] has the format of other
//! messages, and all limits.
//!
//! # Threads
//!
//! One thread serves HTTP ([`server`]), with a bounded number of connections, and a deadline for
//! each step of each connection. It runs no function of the table: two threads run read-only
//! functions, and one runs changes. All threads exist from the start. No thread of the machine or
//! the pager ever waits for a client. These threads never access guest memory, since an access
//! could wait for the network.
//!
//! A request may wait for a change ([`changes`]). It waits asynchronously on the HTTP thread,
//! occupies only its connection, and the number of such requests is limited.
//!
//! Only one change is executed at a time. Others are refused and not queued, since their sender
//! could not know to which state they would apply. Ending the VM by force is never refused.

mod accept;
pub mod changes;
pub mod client;
pub mod directory;
pub mod files;
pub mod protocol;
mod refusing;
pub mod route;
pub mod server;
mod workers;

#[cfg(test)]
mod listening_tests;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod waiting_tests;
