//! The messages that each node sends to each other.

use std::sync::Arc;

use ssi_hv_nodes::{LinkError, Message, Receiver};

use super::Nodes;
use super::seats::Seats;
use crate::irqchip::user::UserChip;
use crate::lifecycle::shared::Shared;

/// What the receiving threads of a node use.
#[derive(Clone, Debug)]
pub(super) struct Board {
    pub nodes: Arc<Nodes>,
    pub chip: Arc<UserChip>,
    pub seats: Arc<Seats>,
    pub shared: Arc<Shared>,
}

impl Board {
    /// Takes the messages of a node until its link ends. `other` gets those that not every node
    /// sends; it gives back what the sender must not send.
    pub fn serve(
        &self,
        receiver: &mut Receiver,
        mut other: impl FnMut(Message) -> Result<(), Message>,
    ) -> LinkError {
        loop {
            let message = match receiver.next(None) {
                Ok(Some(message)) => message,
                // Without a limit of time there is always one.
                Ok(None) => continue,
                Err(error) => return error,
            };
            let message = match self.of_vcpus(receiver, message) {
                Ok(None) => continue,
                Ok(Some(message)) => message,
                Err(refused) => return receiver.broken(refused.to_string()),
            };
            let refused = match self.common(receiver, message) {
                Ok(()) => continue,
                Err(message) => other(message),
            };
            if let Err(message) = refused {
                return receiver.broken(format!("it must not send {message:?}"));
            }
        }
    }

    /// Takes a message about a vCPU that moves; returns any other.
    fn of_vcpus(
        &self,
        receiver: &Receiver,
        message: Message,
    ) -> Result<Option<Message>, super::Refused> {
        let link = receiver.link();
        match message {
            Message::Moved { call, cpu, to } => {
                self.nodes.notified(cpu, link.peer(), to)?;
                let data = [0; 8];
                link.send(&Message::Answer { call, data });
            }
            Message::Vcpu { cpu, state } => {
                self.nodes.came(cpu, link.peer())?;
                self.seats.arrive(cpu, state, &self.shared);
            }
            message => return Ok(Some(message)),
        }
        Ok(None)
    }

    fn common(&self, receiver: &Receiver, message: Message) -> Result<(), Message> {
        let link = receiver.link();
        match message {
            Message::Event { cpu, event } if self.nodes.is_here(cpu) => {
                self.chip.deliver(cpu, event);
            }
            Message::Routing { call, cpu, routing } if self.nodes.is_of(link.peer(), cpu) => {
                self.chip.learn(cpu, routing);
                let data = [0; 8];
                link.send(&Message::Answer { call, data });
            }
            Message::Answer { call, data } if link.answer(call, data) => {}
            message => return Err(message),
        }
        Ok(())
    }
}
