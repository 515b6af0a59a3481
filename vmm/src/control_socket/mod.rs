//! The control socket: how a running `ssi-hv run` or `ssi-hv node` is asked things.
//!
//! Each such process listens on a Unix socket in a directory of its user ([`directory`]). A
//! client sends one line of JSON and gets one line back ([`protocol`]):
//!
//! ```text
//! {"version":1,"request":"status"}
//! {"version":1,"answer":{...}}             or  {"version":1,"error":{"code":...,"text":...}}
//! ```
//!
//! What can be asked is a table ([`server::Request`]): a name and a function. These functions run
//! on the threads of the socket, of which there are [`server::THREADS`]; no thread of the machine
//! or of the pager ever waits for a client. Each client has a deadline for its line and one for
//! taking the answer, so that one which is slow or silent holds up other clients for seconds at
//! the most, and the VM not at all. Guest memory is never touched from here: a touch could wait
//! for the network.

pub mod client;
pub mod directory;
pub mod protocol;
pub mod server;
