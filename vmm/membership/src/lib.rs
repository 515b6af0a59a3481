//! Who is in the cluster, by etcd: nodes register with a lease ([`Registration`]), and VMs find them
//! ([`find`]) and follow changes ([`Watch`]).
//!
//! etcd is asked through its JSON gateway (`/v3`, etcd 3.4 and later) by one thread with a runtime of
//! its own. Nothing that serves pages waits for it: while etcd is away, nodes lend and VMs run as
//! before. What is stored is public: no page, key or token. What is read is not trusted: sizes and
//! counts are limited, each entry is parsed strictly, and one that is wrong is left out. Donors alone
//! decide what they lend, so an entry that is stale lends nothing twice.

mod client;
mod either;
mod error;
mod etcd;
mod list;
mod member;
mod register;
mod target;
#[cfg(feature = "testing")]
pub mod testing;
mod tls;
mod watch;

pub use self::error::{EtcdError, TargetError, TlsError};
pub use self::list::{Found, Listed, NODES_MAX, find};
pub use self::member::{Carrier, MEMBER_BYTES_MAX, MEMBER_SCHEMA, Member, MemberError};
pub use self::register::{LEASE_SECONDS, Registration};
pub use self::target::{Endpoints, Target};
pub use self::tls::Tls;
pub use self::watch::{Watch, Watched};
