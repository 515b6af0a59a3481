//! The control connections of a lease.

use crate::stream::Closer;
use fabric_host::lock;
use std::sync::{Arc, Mutex};

/// Limit of control connections of a lease. A VM uses one, and makes the next when that broke, which
/// this node may learn later.
pub const CONTROLS_MAX: usize = 4;

#[derive(Debug, Default)]
pub(super) struct Controls {
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    /// Number of control connections so far.
    begun: u64,
    /// Those that are open, the oldest first.
    open: Vec<(u64, Closer)>,
}

/// A control connection among those of its lease, until it is dropped. It keeps no memory lent.
#[derive(Debug)]
pub(crate) struct Control {
    number: u64,
    controls: Arc<Controls>,
}

impl Control {
    /// Returns its number: one is added for each connection.
    pub(crate) const fn number(&self) -> u64 {
        self.number
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        let mut table = lock(&self.controls.table);
        table.open.retain(|(number, _)| *number != self.number);
    }
}

impl Controls {
    /// Closes all connections.
    pub(super) fn close_all(&self) {
        for (_, closer) in &lock(&self.table).open {
            closer.close();
        }
    }

    /// Adds a connection. Beyond [`CONTROLS_MAX`] it closes the oldest but that with number `in_use`.
    pub(super) fn begin(self: &Arc<Self>, closer: Closer, in_use: u64) -> Control {
        let mut table = lock(&self.table);
        if table.open.len() >= CONTROLS_MAX {
            let oldest = table.open.iter().position(|(number, _)| *number != in_use);
            let (number, closer) = table.open.remove(oldest.unwrap_or_default());
            closer.close();
            tracing::debug!(
                number,
                "control connection closed: its lease has newer ones"
            );
        }
        table.begun += 1;
        let number = table.begun;
        table.open.push((number, closer));
        drop(table);
        Control {
            number,
            controls: Arc::clone(self),
        }
    }
}
